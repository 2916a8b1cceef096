"""Arguments that a function changes in place, as arrays in and arrays out."""
