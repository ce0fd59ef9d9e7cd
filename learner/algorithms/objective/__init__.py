"""The objective of a run: the configured parts, composed into one loss."""

from learner.algorithms.objective.loss import LossResult as LossResult
from learner.algorithms.objective.objective import Objective as Objective
