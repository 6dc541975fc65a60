"""Ways into the store for processes of this host."""
