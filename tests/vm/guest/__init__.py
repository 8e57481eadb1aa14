"""Virtual machines with high-bandwidth memory, and the programs that run in them."""
