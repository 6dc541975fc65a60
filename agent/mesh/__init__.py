"""How agents find each other and agree, without a master: pure cores. Standard library and `wire` only; no clock or
socket.
"""
