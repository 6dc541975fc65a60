"""How agents reach each other: ZeroMQ over TCP on the agent's own loop (rules Z1-Z7), and where they find each other first.

What travels inside is the mesh's matter; nothing here knows a view, a vote or a rank. Only `addresses`, `hostlist` and
`contact_points` are light enough for the command line; the rest loads pyzmq and is for jobs of several nodes.
"""
