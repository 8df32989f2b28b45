"""Many devices: joining the other processes (mesh.py), talking to them (collectives.py), equal replicas (replicate.py)."""
