"""Starting, watching, ending the worker processes of this node."""
