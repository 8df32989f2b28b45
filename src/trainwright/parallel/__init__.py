"""Parallelism over devices: the mesh (mesh.py), communication (collectives.py), replicas (replicate.py), sharding."""
