"""Methods that build assignments and improve them."""
