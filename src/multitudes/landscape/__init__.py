"""Why it works: what trained networks look like in weight space, in function space and inside."""

from multitudes.landscape.accuracy_diversity import DiversityPlane, diversity_plane
from multitudes.landscape.density import hessian_trace, spectral_density
from multitudes.landscape.directions import between, dropped, filter_normalised, principal, random_direction
from multitudes.landscape.explanation import Explanation, explain
from multitudes.landscape.features import FeatureUncertainty, feature_uncertainty, neighbour_covariance
from multitudes.landscape.flatness import expected_sharpness, loss_variance, sharpness
from multitudes.landscape.fourier import FeatureSpectrum, feature_spectrum, frequency_accuracy
from multitudes.landscape.function_space import FunctionMap, Similarity, function_map, similarity
from multitudes.landscape.growing import growth, initialisation_against_order, under_corruption, variants
from multitudes.landscape.hessian import HessianSpectrum, hessian_spectrum
from multitudes.landscape.path import Path, curve, tunnel
from multitudes.landscape.planes import Plane, plane
from multitudes.landscape.prior import Prior, function_prior
from multitudes.landscape.solutions import Solutions, read_solutions, subspaces
from multitudes.landscape.stitching import Stitched, stitched

__all__ = [
    "DiversityPlane",
    "Explanation",
    "FeatureSpectrum",
    "FeatureUncertainty",
    "FunctionMap",
    "HessianSpectrum",
    "Path",
    "Plane",
    "Prior",
    "Similarity",
    "Solutions",
    "Stitched",
    "between",
    "curve",
    "diversity_plane",
    "dropped",
    "expected_sharpness",
    "explain",
    "feature_spectrum",
    "feature_uncertainty",
    "filter_normalised",
    "frequency_accuracy",
    "function_map",
    "function_prior",
    "growth",
    "hessian_spectrum",
    "hessian_trace",
    "initialisation_against_order",
    "loss_variance",
    "neighbour_covariance",
    "plane",
    "principal",
    "random_direction",
    "read_solutions",
    "sharpness",
    "similarity",
    "spectral_density",
    "stitched",
    "subspaces",
    "tunnel",
    "under_corruption",
    "variants",
]
