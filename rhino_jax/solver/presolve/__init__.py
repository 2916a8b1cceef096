"""What takes away nodes and options, exactly, and the way back."""
