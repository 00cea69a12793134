"""Scores, worked out by hand; metrics of scores against scikit-learn and scipy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy
from sklearn.calibration import calibration_curve
from sklearn.metrics import f1_score, recall_score, roc_auc_score, top_k_accuracy_score

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import ClientShard, Federation, Split, TensorImages, Unseen
from fedbench.core.types import Predictions
from fedbench.rounds.metrics import (
    calibration_error,
    macro_auroc,
    macro_f1,
    over_clients,
    score,
    score_metrics,
    size_in_bytes,
    summarise,
    unseen_metrics,
    validation_accuracy,
)


def split(labels, domains=None):
    images = TensorImages(torch.zeros(len(labels), 3, 1, 1, dtype=torch.uint8))
    return Split(images, torch.tensor(labels), None if domains is None else torch.tensor(domains))


def federation(test, train_labels=(0, 0, 0, 1), clients=None, **kwargs):
    shards = clients or (ClientShard(0, torch.tensor([0, 1, 2])), ClientShard(1, torch.tensor([3])))
    return Federation(shards, split(list(train_labels)), test, ("cat", "dog", "owl"), **kwargs)


def test_overall_is_over_samples_balanced_over_classes_and_absent_classes_do_not_count():
    # cat 2 of 4 right, dog 1 of 1: overall 3/5, balanced (50 + 100) / 2, owl has no test sample
    got = score(Predictions(torch.tensor([0, 0, 1, 1, 1])), federation(split([0, 0, 0, 0, 1])))
    assert got["global_accuracy"] == pytest.approx(60)
    assert got["balanced_accuracy"] == pytest.approx(75)
    assert got["class_accuracy/cat"] == pytest.approx(50)
    assert "class_accuracy/owl" not in got


def test_group_accuracy_is_the_mean_over_its_classes_and_an_empty_group_is_absent():
    groups = {"head": (0, 1), "mid": (2,), "tail": ()}
    # cat 50, dog 100 -> head 75; owl 0
    got = score(Predictions(torch.tensor([0, 1, 1, 0])), federation(split([0, 0, 1, 2]), groups=groups))
    assert got["head_accuracy"] == pytest.approx(75)
    assert got["mid_accuracy"] == 0
    assert "tail_accuracy" not in got


def test_domain_mean_is_unweighted_and_the_unseen_domain_is_reported_apart():
    test = split([0, 0, 0, 1, 1], [0, 0, 0, 1, 2])
    # domain a 1/3, b 1, c 0: mean 44.44; held out a: seen = (100 + 0) / 2
    fed = federation(test, domain_names=("a", "b", "c"), held_out_domain=0)
    got = score(Predictions(torch.tensor([0, 1, 1, 1, 0])), fed)
    assert got["domain_mean_accuracy"] == pytest.approx(400 / 9)
    assert got["unseen_domain_accuracy"] == pytest.approx(100 / 3)
    assert got["seen_domain_accuracy"] == pytest.approx(50)


def test_clients_without_own_test_samples_are_scored_by_their_class_shares():
    # per class: cat 50, dog 100. client 0 holds 3 cats -> 50, client 1 a dog -> 100
    got = score(Predictions(torch.tensor([0, 1, 1])), federation(split([0, 0, 1])))
    assert got["worst_client_accuracy"] == pytest.approx(50)
    assert got["mean_client_accuracy"] == pytest.approx(75)


def test_clients_with_own_test_samples_are_scored_on_them():
    shards = (
        ClientShard(0, torch.tensor([0]), torch.tensor([0, 1])),
        ClientShard(1, torch.tensor([3]), torch.tensor([2])),
    )
    got = score(Predictions(torch.tensor([0, 0, 0])), federation(split([0, 0, 1]), clients=shards))
    assert (got["mean_client_accuracy"], got["worst_client_accuracy"]) == (50, 0)


def test_a_clients_own_predictions_and_the_global_models_are_never_in_one_number():
    predictions = Predictions(torch.tensor([1, 1, 1]), {0: torch.tensor([0, 0, 1])})
    # global: only the dog right. Client 0's own model: cats right -> 100; client 1 (a dog) has none: the global -> 100
    got = score(predictions, federation(split([0, 0, 1])))
    assert got["global_accuracy"] == pytest.approx(100 / 3)
    assert (got["worst_client_accuracy"], got["mean_client_accuracy"]) == (0, 50)
    assert (got["personal_worst_client_accuracy"], got["personal_mean_client_accuracy"]) == (100, 100)
    # on everything: all right by client 0's own model, the dog alone by the global one that serves client 1
    assert got["personal_mean_global_accuracy"] == pytest.approx((100 + 100 / 3) / 2)
    alone = score(Predictions(torch.tensor([1, 1, 1])), federation(split([0, 0, 1])))
    assert {name: value for name, value in got.items() if "personal" not in name} == alone


def test_without_a_global_model_only_personal_numbers_are_given():
    predictions = Predictions(None, {0: torch.tensor([0, 1, 1]), 1: torch.tensor([0, 0, 0])})
    got = score(predictions, federation(split([0, 0, 1])))
    everywhere = got.pop("personal_mean_global_accuracy")
    assert all(name.startswith("personal_") for name in got)
    assert (got["personal_mean_client_accuracy"], got["personal_worst_client_accuracy"]) == (25, 0)
    # two of three by either
    assert everywhere == pytest.approx(200 / 3)
    with pytest.raises(FedbenchError, match="client 1 has no predictions"):
        score(Predictions(None, {0: torch.tensor([0, 1, 1])}), federation(split([0, 0, 1])))


def test_own_models_on_the_whole_test_split_are_not_scored_by_the_clients_samples():
    shards = (
        ClientShard(0, torch.tensor([0]), torch.tensor([0, 1])),
        ClientShard(1, torch.tensor([3]), torch.tensor([2])),
    )
    predictions = Predictions(torch.tensor([2, 2, 2]), {0: torch.tensor([0, 0, 0]), 1: torch.tensor([1, 1, 1])})
    got = score(predictions, federation(split([0, 0, 1]), clients=shards))
    # each is right on all of its own samples; of all three, one on the two cats and the other on the dog
    assert (got["personal_mean_client_accuracy"], got["global_accuracy"]) == (100, 0)
    assert got["personal_mean_global_accuracy"] == pytest.approx((200 / 3 + 100 / 3) / 2)


def test_by_group_own_models_and_the_global_one_are_scored_over_the_same_clients_and_samples():
    shards = (
        ClientShard(0, torch.tensor([0]), torch.tensor([0, 2, 3])),
        ClientShard(1, torch.tensor([1]), torch.tensor([1])),
        ClientShard(2, torch.tensor([2, 3, 4, 5])),
    )
    groups = {"many": (0,), "medium": (), "few": (1, 2)}
    fed = federation(split([0, 0, 1, 1, 2]), (0, 0, 0, 1, 2, 2), clients=shards, groups=groups)
    own = {0: torch.tensor([0, 0, 1, 2, 0]), 1: torch.tensor([0, 2, 1, 1, 2]), 2: torch.tensor([0, 1, 1, 1, 0])}
    got = score(Predictions(torch.tensor([0, 1, 1, 0, 2]), own), fed)
    # client 0 has a cat (right) and two dogs (one right), client 1 a cat (wrong) and none of the few; client 2, without
    # test samples, holds a cat (50), a dog (100) and two owls (0)
    assert got["personal_many_client_accuracy"] == pytest.approx((100 + 0 + 50) / 3)
    assert got["personal_few_client_accuracy"] == pytest.approx((50 + 100 / 3) / 2)
    # by the global model the same: cats 1 of 2, dogs 1 of 2, the owl right
    assert got["many_client_accuracy"] == pytest.approx((100 + 0 + 50) / 3)
    assert got["few_client_accuracy"] == pytest.approx((50 + (50 + 2 * 100) / 3) / 2)
    assert not [name for name in got if "medium" in name]
    # and by class, whoever holds it
    assert (got["many_accuracy"], got["few_accuracy"]) == (50, 75)
    # over all classes as before there were groups
    plain = score(Predictions(torch.tensor([0, 1, 1, 0, 2]), own), replace(fed, groups={}))
    assert plain == {name: value for name, value in got.items() if "many" not in name and "few" not in name}


def test_a_group_of_which_no_client_has_a_tested_class_is_left_out_over_clients():
    shards = (ClientShard(0, torch.tensor([0]), torch.tensor([0])), ClientShard(1, torch.tensor([1])))
    fed = federation(split([0, 0, 1]), (0, 0, 1), clients=shards, groups={"head": (0,), "tail": (1, 2)})
    got = score(Predictions(torch.tensor([0, 1, 1]), {0: torch.tensor([0, 0, 0])}), fed)
    assert got["tail_accuracy"] == 100
    assert "tail_client_accuracy" not in got and "personal_tail_client_accuracy" not in got
    assert (got["head_client_accuracy"], got["personal_head_client_accuracy"]) == (75, 75)


def test_validation_accuracy_is_the_unweighted_mean_over_domains():
    validation = split([0, 0, 0, 1], [0, 0, 0, 1])
    assert validation_accuracy(torch.tensor([0, 0, 1, 0]), validation) == pytest.approx(100 / 3)


def test_summary_has_last_round_mean_of_ten_oracle_and_selected_round():
    curve = {r: {"global_accuracy": float(a), "validation_accuracy": v} for r, a, v in
             ((0, 10, 9.0), (1, 50, 1.0), (2, 70, 3.0), (3, 60, 3.0), (4, 40, 2.0))}  # fmt: skip
    got = summarise(curve)
    assert got["global_accuracy"] == 40
    assert got["last10_accuracy"] == 55  # rounds 1-4; round 0 is no training
    assert got["oracle_accuracy"] == 70
    # round 0 is best on validation but untrained; of rounds 2 and 3, which are equal on it, the earlier
    assert (got["selected_round"], got["selected_accuracy"]) == (2, 70)
    assert summarise({0: curve[0]})["selected_round"] == 0


def test_bytes_count_every_tensor_by_its_own_type():
    tensors = {
        "a": torch.zeros(3, 2),
        "b": torch.zeros(5, dtype=torch.int64),
        "c": torch.zeros((), dtype=torch.float16),
    }
    assert size_in_bytes(tensors, {"d": torch.zeros(1)}) == 24 + 40 + 2 + 4


def test_selected_round_gives_all_three_accuracies_of_a_held_out_domain():
    names = ("global_accuracy", "unseen_domain_accuracy", "seen_domain_accuracy", "domain_mean_accuracy")
    curve = {r: {**dict.fromkeys(names, 10.0 * r), "validation_accuracy": v} for r, v in ((1, 5.0), (2, 9.0), (3, 7.0))}
    got = summarise(curve)
    assert {name: got[f"selected_{name}"] for name in names[1:]} == dict.fromkeys(names[1:], 20.0)
    assert got["selected_accuracy"] == 20.0


# --- of scores

CLASSES = 8
NAMES = tuple("abcdefgh")


def split_of(labels):
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
    fed = Federation(clients, split_of(labels), split_of(labels), NAMES)
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
    unseen = Unseen(split_of(labels), NAMES)
    assert unseen_metrics(logits.argmax(1), unseen, None, logits)["new_auroc"] == macro_auroc(logits, labels)
