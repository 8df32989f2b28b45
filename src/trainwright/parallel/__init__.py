"""Many devices: joining the processes (mesh.py), talking between them (collectives.py), replicas (replicate.py)."""
