"""Virtual machines that have high-bandwidth memory, and what runs in them."""
