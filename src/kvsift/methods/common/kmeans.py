"""Deterministic Euclidean k-means."""

from __future__ import annotations

import torch
from torch import Tensor


def fit(points: Tensor, count: int, iterations: int, seed: int) -> Tensor:
    """Fit centroids to points [.., n, dim], separately for each leading index: float64 [.., min(count, n), dim].

    They start at points drawn by ``seed`` and move to the mean of their nearest points, ``iterations`` times; one
    without points stays. float64, so that no tie depends on the memory layout of the points.
    """
    points = points.double()
    drawn = torch.randperm(points.shape[-2], generator=torch.Generator().manual_seed(seed))[:count]
    centroids = points[..., drawn.to(points.device), :]
    for _ in range(iterations):
        assigned = nearest(points, centroids)  # [.., n]
        sums = torch.zeros_like(centroids).scatter_add_(-2, assigned.unsqueeze(-1).expand_as(points), points)
        sizes = torch.zeros_like(centroids[..., 0]).scatter_add_(-1, assigned, torch.ones_like(points[..., 0]))
        centroids = torch.where(sizes.unsqueeze(-1) > 0, sums / sizes.clamp_min(1).unsqueeze(-1), centroids)
    return centroids


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Return the nearest centroid of each point, ties to the first: [.., n, dim], [.., count, dim] -> int64 [.., n]."""
    # |x - c|^2 without |x|^2, which is the same for all centroids
    distances = centroids.double().square().sum(-1).unsqueeze(-2) - 2 * points.double() @ centroids.double().mT
    return distances.argmin(-1)
