"""Metrics of scores, against scikit-learn, scipy and sums by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy
from sklearn.calibration import calibration_curve
from sklearn.metrics import f1_score, recall_score, roc_auc_score, top_k_accuracy_score

from fedbench.core.federation import Federation, Split, TensorImages, Unseen
from fedbench.core.partition import ClientShard
from fedbench.core.types import Predictions
from fedbench.rounds.metrics import (
    calibration_error,
    macro_auroc,
    macro_f1,
    over_clients,
    score,
    score_metrics,
    unseen_metrics,
)

CLASSES = 8
NAMES = tuple("abcdefgh")


def split(labels):
    return Split(TensorImages(torch.zeros(len(labels), 3, 1, 1, dtype=torch.uint8)), labels)


@pytest.fixture(scope="module")
def drawn():
    """Logits (400, 8) that are right more often than not, and labels (400,)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (400,), generator=generator)
    logits = torch.randn(400, CLASSES, generator=generator)
    logits[torch.arange(400), labels] += 1.2
    return logits, labels


def test_as_scikit_learn_has_them(drawn):
    logits, labels = drawn
    probabilities, predicted = softmax(logits.double().numpy(), axis=1), logits.argmax(1)
    got = score_metrics(logits, labels)
    assert got["top5_accuracy"] == pytest.approx(100 * top_k_accuracy_score(labels, probabilities, k=5))
    assert got["prediction_entropy"] == pytest.approx(100 * entropy(probabilities, axis=1).mean() / math.log(CLASSES))
    assert macro_f1(predicted, labels, CLASSES) == pytest.approx(100 * f1_score(labels, predicted, average="macro"))
    assert macro_auroc(logits, labels) == pytest.approx(100 * roc_auc_score(labels, probabilities, multi_class="ovr"))
    # scikit-learn's bins have the frequencies and the mean confidences; their sizes are counted here
    confidence, right = probabilities.max(1), (predicted == labels).numpy()
    share, mean = calibration_curve(right, confidence, n_bins=15)
    sizes = np.histogram(confidence, np.linspace(0, 1, 16))[0]
    expected = (np.abs(share - mean) * sizes[sizes > 0]).sum() / len(labels)
    assert got["calibration_error"] == pytest.approx(100 * expected)


def test_recalls_of_the_classes_are_their_accuracies(drawn):
    logits, labels = drawn
    clients = (ClientShard(0, torch.arange(300)), ClientShard(1, torch.arange(300, 400)))
    fed = Federation(clients, split(labels), split(labels), NAMES)
    got = score(Predictions(logits.argmax(1), scores=logits), fed)
    recalls = recall_score(labels, logits.argmax(1), average=None)
    assert [got[f"class_accuracy/{name}"] for name in NAMES] == pytest.approx((100 * recalls).tolist())
    assert {"top5_accuracy", "calibration_error", "prediction_entropy", "macro_f1"} <= got.keys()


def test_equal_scores_count_half_and_one_class_alone_has_no_curve():
    labels = torch.tensor([0, 0, 1, 1])
    # class 0's pairs: (0.5, 0.5) half, (0.5, 0.2) ahead, (0.9, 0.5) ahead, (0.9, 0.2) ahead; the other class alike
    scores = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5], [0.2, 0.8]]).log()
    assert macro_auroc(scores, labels) == pytest.approx(100 * 3.5 / 4)
    assert macro_auroc(scores[:2], labels[:2]) is None


def test_calibration_of_the_sure_and_wrong_and_of_the_edges():
    assert calibration_error(torch.ones(4), torch.zeros(4, dtype=torch.bool)) == 100
    assert calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([True, True])) == 0
    # 0.5 and 1.0 stand in bins of their own: (|0 - 0.5| + |1 - 1|) / 2
    assert calibration_error(torch.tensor([0.5, 1.0]), torch.tensor([False, True])) == pytest.approx(25)


def test_few_classes_have_no_top5_and_masked_or_diverged_logits_no_nan():
    labels = torch.tensor([0, 1])
    got = score_metrics(torch.tensor([[1.0, -torch.inf], [0.0, 0.0]]), labels)
    assert "top5_accuracy" not in got and got["prediction_entropy"] == pytest.approx(50)
    assert score_metrics(torch.full((2, 2), torch.nan), labels) == {}


def test_over_clients_as_numpy_has_it_and_gini_by_all_pairs():
    values = [10.0, 50.0, 50.0, 90.0, 100.0]
    got = over_clients(values, "personal_")
    pairs = sum(abs(a - b) for a in values for b in values) / (2 * len(values) * sum(values))
    assert got == pytest.approx(
        {
            "personal_mean_client_accuracy": 60.0,
            "personal_worst_client_accuracy": 10.0,
            "personal_std_client_accuracy": np.std(values),
            "personal_p10_client_accuracy": np.percentile(values, 10),
            "personal_gini_client_accuracy": 100 * pairs,
        }
    )
    assert over_clients([0.0, 0.0])["gini_client_accuracy"] == 0 == over_clients([7.0])["std_client_accuracy"]


def test_unseen_classes_have_an_auroc(drawn):
    logits, labels = drawn
    unseen = Unseen(split(labels), NAMES)
    assert unseen_metrics(logits.argmax(1), unseen, None, logits)["new_auroc"] == macro_auroc(logits, labels)
