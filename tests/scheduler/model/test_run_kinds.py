"""How long runs take is learnt by kind of run, kind of GPU and size; what was not seen is concluded from what was."""

from __future__ import annotations

import pytest

from modelpool.pool.values.specs.spec import ComponentKey, Stage
from modelpool.scheduler.model.gpu_kinds import GPU_KINDS
from modelpool.scheduler.model.run_kinds import FORGOTTEN_AFTER, RunKind, RunKinds

SMALL, LARGE = 20, 24
H100, RTX4090, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB"


def of(kinds: RunKinds, name: str = "paint") -> RunKind:
    return kinds.kind(Stage.SAMPLE, (ComponentKey(name),))


def test_a_kind_that_never_ran_takes_its_prior_over_the_speed_of_the_gpu() -> None:
    kinds = RunKinds()
    assert kinds.ratio(of(kinds), "", SMALL) == 1.0
    assert kinds.ratio(of(kinds), "cpu", SMALL) == 1.0
    assert kinds.ratio(of(kinds), A100, SMALL) == 1.0
    assert kinds.ratio(of(kinds), H100, SMALL) == pytest.approx(1.0 / GPU_KINDS["H100"].speed)
    assert of(kinds).ratio is None


def test_what_was_measured_on_another_kind_of_gpu_is_scaled_by_the_table() -> None:
    kinds = RunKinds()
    kinds.learn(of(kinds), H100, SMALL, 4.0)
    scale = GPU_KINDS["H100"].speed / GPU_KINDS["RTX4090"].speed
    assert kinds.ratio(of(kinds), RTX4090, SMALL) == pytest.approx(4.0 * scale)
    assert kinds.ratio(of(kinds), H100, SMALL) == 4.0


def test_names_of_one_kind_of_gpu_share_what_was_learnt() -> None:
    kinds = RunKinds()
    kinds.learn(of(kinds), "NVIDIA A100-SXM4-80GB", SMALL, 4.0)
    assert kinds.ratio(of(kinds), "NVIDIA A100 80GB PCIe", SMALL) == 4.0


def test_measurements_on_a_gpu_replace_conclusions_for_it() -> None:
    kinds = RunKinds()
    kinds.learn(of(kinds), H100, SMALL, 4.0)
    kinds.learn(of(kinds), RTX4090, SMALL, 5.0)
    assert kinds.ratio(of(kinds), RTX4090, SMALL) == 5.0


def test_how_fast_gpus_are_that_no_table_knows_is_learnt_from_what_both_ran() -> None:
    """After three comparisons, and for kinds of run that one of them never ran; either way round."""
    kinds = RunKinds()
    kinds.learn(of(kinds, "new"), "left", SMALL, 2.0)
    kinds.learn(of(kinds, "newer"), "right", SMALL, 9.0)
    assert kinds.ratio(of(kinds, "new"), "right", SMALL) == 2.0, "nothing is known of them"
    for name in ("one", "two", "three"):
        kinds.learn(of(kinds, name), "left", SMALL, 1.0)
        kinds.learn(of(kinds, name), "right", SMALL, 3.0)
    assert kinds.ratio(of(kinds, "new"), "right", SMALL) == pytest.approx(6.0)
    assert kinds.ratio(of(kinds, "newer"), "left", SMALL) == pytest.approx(3.0)


def test_what_was_remembered_is_forgotten_when_gpus_turn_out_to_be_otherwise() -> None:
    kinds = RunKinds()
    new = of(kinds, "new")
    kinds.learn(new, "left", SMALL, 2.0)
    assert kinds.ratio(new, "right", SMALL) == 2.0
    for name in ("one", "two", "three"):
        kinds.learn(of(kinds, name), "left", SMALL, 1.0)
        kinds.learn(of(kinds, name), "right", SMALL, 3.0)
    assert new.ratios == {SMALL: {}}


def test_what_was_remembered_is_forgotten_when_runs_take_another_time() -> None:
    kinds = RunKinds()
    kind = of(kinds)
    for _ in range(4):
        kinds.learn(kind, A100, SMALL, 1.0)
    assert kinds.ratio(kind, A100, SMALL) == 1.0
    for _ in range(5):
        kinds.learn(kind, A100, SMALL, 9.0)
    assert A100 not in kind.ratios[SMALL]
    assert kinds.ratio(kind, A100, SMALL) == 9.0


def test_measured_comparisons_count_more_than_the_table() -> None:
    kinds = RunKinds()
    for name in ("one", "two", "three"):
        kinds.learn(of(kinds, name), H100, SMALL, 1.0)
        kinds.learn(of(kinds, name), RTX4090, SMALL, 10.0)
    assert kinds.slowness(RTX4090, H100) == pytest.approx(10.0)
    assert kinds.slowness(H100, RTX4090) == pytest.approx(0.1)


def test_one_comparison_says_less_than_the_table() -> None:
    kinds = RunKinds()
    before = kinds.slowness(RTX4090, H100)
    kinds.learn(of(kinds), H100, SMALL, 1.0)
    kinds.learn(of(kinds), RTX4090, SMALL, 100.0)
    assert kinds.slowness(RTX4090, H100) == before


def test_of_what_other_gpus_say_the_median_is_believed() -> None:
    kinds = RunKinds()
    for name, ratio in (("left", 1.0), ("middle", 2.0), ("right", 90.0)):
        kinds.learn(of(kinds), name, SMALL, ratio)
    assert kinds.ratio(of(kinds), "new", SMALL) == 2.0


def test_stages_of_one_model_are_learnt_apart() -> None:
    kinds = RunKinds()
    encode, decode = (kinds.kind(stage, (ComponentKey("vae"),)) for stage in (Stage.ENCODE, Stage.DECODE))
    kinds.learn(encode, "", SMALL, 5.0)
    assert (kinds.ratio(encode, "", SMALL), kinds.ratio(decode, "", SMALL)) == (5.0, 1.0)


def test_a_prior_that_is_wrong_by_size_is_learnt_for_each_size() -> None:
    """From the third run of a size on; before, all sizes together say it."""
    kinds = RunKinds()
    kind = of(kinds)
    for _ in range(4):
        kinds.learn(kind, A100, SMALL, 1.0)
    kinds.learn(kind, A100, LARGE, 4.0)
    assert kinds.ratio(kind, A100, LARGE) == 1.0
    kinds.learn(kind, A100, LARGE, 4.0)
    kinds.learn(kind, A100, LARGE, 4.0)
    assert kinds.ratio(kind, A100, LARGE) == 4.0
    assert kinds.ratio(kind, A100, SMALL) == 1.0
    assert 1.0 <= kinds.ratio(kind, A100, SMALL - 1) <= 4.0


def test_a_size_that_was_learnt_elsewhere_is_that_size_here_too() -> None:
    kinds = RunKinds()
    kind = of(kinds)
    for size, ratio in ((SMALL, 1.0), (LARGE, 4.0)):
        for _ in range(3):
            kinds.learn(kind, "left", size, ratio)
    assert kinds.ratio(kind, "right", LARGE) == 4.0
    assert kinds.ratio(kind, "right", SMALL) == 1.0


def test_one_outlier_among_runs_moves_the_next_prediction_little() -> None:
    kinds = RunKinds()
    for measured in (1.0, 1.1, 100.0, 1.0, 0.9):
        kinds.learn(of(kinds), A100, SMALL, measured)
    assert kinds.ratio(of(kinds), A100, SMALL) == pytest.approx(1.0, rel=0.1)


def test_what_a_batch_saves_is_learnt_for_its_number_of_members() -> None:
    kinds = RunKinds()
    kind = of(kinds)
    assert kinds.batch_share(kind, A100, 4, SMALL) == 1.0
    kinds.learn(kind, A100, SMALL, 2.0)
    kinds.learn(kind, A100, SMALL, 1.5, members=4)
    assert kinds.batch_share(kind, A100, 4, SMALL) == 0.75
    assert kinds.batch_share(kind, A100, 2, SMALL) == 1.0
    assert kinds.ratio(kind, A100, SMALL) == 2.0, "what one takes alone is not what one of four takes"


def test_a_batch_that_did_not_pay_is_tried_again_after_many_smaller_runs() -> None:
    """Two measurements while the machine had other load would decide for ever. One that is in use is not forgotten."""
    kinds = RunKinds()
    kind = of(kinds)
    for members in (1, 1, 2, 2, 4, 4):
        kinds.learn(kind, A100, SMALL, 1.0, members)
    kinds.learn(kind, A100, SMALL, 1.0, 2)
    for _ in range(FORGOTTEN_AFTER * 2):
        assert kinds.batch_runs(kind, A100, 2, SMALL) == 3
        kinds.learn(kind, A100, LARGE, 1.0)
        kinds.learn(kind, A100, SMALL, 1.0)
    assert (kinds.batch_runs(kind, A100, 2, SMALL), kinds.batch_share(kind, A100, 2, SMALL)) == (0, 1.0)
    assert kinds.batch_runs(kind, A100, 4, SMALL) == 2
    for _ in range(FORGOTTEN_AFTER * 2):
        kinds.learn(kind, A100, SMALL, 0.5, 2)
    assert (kinds.batch_runs(kind, A100, 2, SMALL), kinds.batch_runs(kind, A100, 4, SMALL)) == (7, 0)


def test_what_a_batch_saves_is_held_against_runs_of_its_size() -> None:
    kinds = RunKinds()
    kind = of(kinds)
    for size, ratio in ((SMALL, 1.0), (LARGE, 4.0)):
        for _ in range(3):
            kinds.learn(kind, A100, size, ratio)
    kinds.learn(kind, A100, LARGE, 2.0, members=4)
    assert kinds.batch_share(kind, A100, 4, LARGE) == 0.5


def test_a_kind_that_only_ran_in_batches_is_known_by_its_share() -> None:
    kinds = RunKinds()
    kinds.learn(of(kinds), A100, SMALL, 1.5, members=4)
    assert kinds.ratio(of(kinds), A100, SMALL) == 1.5
    assert kinds.batch_share(of(kinds), A100, 4, SMALL) == 1.0
