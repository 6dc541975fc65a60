"""A whole job in one process and in virtual time: the judge of the mesh's protocol. Public: users may test policies of
their own."""
