"""How well a rule foretells which draft tokens are accepted (DISCO, table 4: F1 of acceptance)."""

import numpy as np
from jaxtyping import Bool, Float, Int


def scores_of(
    predicted: Bool[np.ndarray, " N"], accepted: Bool[np.ndarray, " N"]
) -> dict[str, float]:
    """Precision, recall and F1 of predicting acceptance; 0 where undefined."""
    right = int(np.sum(predicted & accepted))
    num_predicted, num_accepted = int(np.sum(predicted)), int(np.sum(accepted))
    return {
        "precision": right / max(num_predicted, 1),
        "recall": right / max(num_accepted, 1),
        "f1": 2 * right / max(num_predicted + num_accepted, 1),
    }


def best_threshold(confidence: Float[np.ndarray, " N"], accepted: Bool[np.ndarray, " N"]) -> float:
    """The threshold with the highest F1, half-way between two confidences that occur."""
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order].astype(np.float64)
    right = np.cumsum(accepted[order])
    f1 = 2 * right / (np.arange(1, len(order) + 1) + right[-1])
    below = np.append(ordered[1:], 0.0)
    f1[ordered == below] = -1.0  # equal confidences fall on one side
    best = int(np.argmax(f1))
    return float((ordered[best] + below[best]) / 2)


def best_static_length(
    depth: Int[np.ndarray, " N"], accepted: Bool[np.ndarray, " N"]
) -> int | None:
    """The length of a static draft with the highest F1; None if unlimited."""
    lengths = range(1, int(depth.max()) + 1)
    f1 = [scores_of(depth < length, accepted)["f1"] for length in lengths]
    unlimited = scores_of(np.ones_like(accepted), accepted)["f1"]
    return None if not f1 or unlimited >= max(f1) else 1 + int(np.argmax(f1))
