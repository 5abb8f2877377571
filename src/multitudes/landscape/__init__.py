"""Analyses of trained networks in weight space, in function space, and of their feature maps.

`explain` combines the main ones on one page. Results are dataclasses of CPU tensors with a method `plot`. To add an
analysis, write a module with a result class and a function, and export both here. Imports `ensemble`, `surgery`,
`methods`, `training`, `metrics`, `shift` and `evaluation`.
"""

from multitudes.landscape.accuracy_diversity import DiversityPlane, diversity_plane
from multitudes.landscape.ensemble_growth import growth
from multitudes.landscape.explanation import Explanation, explain
from multitudes.landscape.feature_maps import FeatureUncertainty, feature_uncertainty, neighbour_covariance
from multitudes.landscape.fourier import FeatureSpectrum, feature_spectrum
from multitudes.landscape.function_space import FunctionMap, Similarity, function_map, similarity
from multitudes.landscape.prior_functions import FunctionPrior, function_prior
from multitudes.landscape.solutions import Solutions, read_solutions, subspaces
from multitudes.landscape.weight_space.directions import filter_normalised, random_direction
from multitudes.landscape.weight_space.flatness import expected_sharpness, loss_variance, sharpness
from multitudes.landscape.weight_space.hessian import HessianSpectrum, hessian_spectrum
from multitudes.landscape.weight_space.path import Path, tunnel
from multitudes.landscape.weight_space.planes import Plane, plane

__all__ = [
    "DiversityPlane",
    "Explanation",
    "FeatureSpectrum",
    "FeatureUncertainty",
    "FunctionMap",
    "FunctionPrior",
    "HessianSpectrum",
    "Path",
    "Plane",
    "Similarity",
    "Solutions",
    "diversity_plane",
    "expected_sharpness",
    "explain",
    "feature_spectrum",
    "feature_uncertainty",
    "filter_normalised",
    "function_map",
    "function_prior",
    "growth",
    "hessian_spectrum",
    "loss_variance",
    "neighbour_covariance",
    "plane",
    "random_direction",
    "read_solutions",
    "sharpness",
    "similarity",
    "subspaces",
    "tunnel",
]
