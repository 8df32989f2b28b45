"""torch.compile and CUDA graphs: compiled regions, guards that name the user's line, reports of graph breaks."""
