"""Analyses of the loss in weight space: planes, paths, directions, curvature and sharpness."""
