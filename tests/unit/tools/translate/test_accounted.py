"""No setting is lost: each is translated, to do, or harmless for a reason that stands in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm.cli import main
from moe_trm.tools.translate import Draft, from_slime, from_trl, from_verl, slime, trl, verl
from moe_trm.tools.translate.foreign_setting import ForeignSetting
from moe_trm.tools.translate.tables import Tables, _among, guarded, listed_keys
from tests.unit.tools.translate.reading import of_slime, of_verl

CASES = Path(__file__).with_name("cases")
TABLES = {"verl": verl.TABLES, "slime": slime.TABLES, "miles": slime.TABLES, "trl": trl.TABLES}
IN_LINES: tuple[str, ...] = ("slime", "miles")
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"


def fate_of(framework: str, tables: Tables, key: str) -> Any:
    value: Any = ("0.37",) if framework in IN_LINES else 0.37
    return tables.fate(key, ForeignSetting(key, value, "", "0.37"), {})


@pytest.mark.parametrize("framework", TABLES)
def test_each_key_of_the_frameworks_definitions_has_a_fate(framework: str) -> None:
    tables = TABLES[framework]
    read = {key for rule in tables.rules for key in rule.reads}
    keys = sorted(key.removesuffix(".*") for key in listed_keys(framework))
    assert len(keys) > 200
    unknown = [key for key in keys if key not in read and fate_of(framework, tables, key).kind == "unknown"]
    assert unknown == []


@pytest.mark.parametrize("framework", TABLES)
def test_terms_of_the_objective_are_never_harmless(framework: str) -> None:
    tables = TABLES[framework]
    read = {key for rule in tables.rules for key in rule.reads}
    switched_off = ("is off", "critic here")
    harmless = {
        key: fate.reason
        for key in listed_keys(framework)
        if guarded(key) and key not in read
        for fate in [fate_of(framework, tables, key.removesuffix(".*"))]
        if fate.kind == "harmless" and not fate.reason.endswith(switched_off)
    }
    assert harmless == {}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("moe_aux_loss_coeff", "a term of the objective"),
        ("moe-z-loss-coeff", "a term of the objective"),
        ("a.b.kl_loss_coef", "a term of the objective"),
        ("use_mopd", "distillation"),
        ("opd-teacher-load", "distillation"),
        ("fp8_recipe", "precision"),
        ("rollout.max_head_offpolicyness", "staleness"),
        ("mask_truncated_completions", "masks and filters of samples"),
        ("multimodal-keys", "pictures, sound or video"),
        ("data.image_key", "pictures, sound or video"),
        ("model_revision", None),
        ("num_workers", None),
        ("save_interval", None),
        ("recompute-loss-function", None),
        ("delta_weight_sync_dtype", None),
    ],
)
def test_what_is_guarded(key: str, kind: str | None) -> None:
    assert guarded(key) == kind


@pytest.mark.parametrize(
    ("name", "translate"),
    [
        ("trl_entropy.yaml", from_trl),
        ("tr.yaml", from_trl),
        ("v.yaml", from_verl),
        ("fa2.sh", from_slime),
        ("mopd.sh", from_slime),
    ],
)
def test_no_setting_of_a_public_file_is_unaccounted_for(name: str, translate: Any) -> None:
    draft: Draft = translate(CASES / name)
    assert [key for key in draft.settings if not draft.accounted(key)] == []
    assert set(draft.missing) & set(draft.to_do) == set()
    assert [key for key in draft.missing if guarded(key) and draft.settings[key].shown not in ("0", "0.0")] == []


def test_an_entropy_bonus_stays() -> None:
    draft = from_trl(CASES / "trl_entropy.yaml")
    assert draft.values["loss.entropy_coef"] == 0.01
    assert "router_aux_loss_coef of config.json" in " ".join(draft.remarks)
    assert "router_aux_loss_coef" in from_trl(CASES / "tr.yaml").to_do


def test_terms_precision_and_pictures_of_verl() -> None:
    draft = from_verl(CASES / "v.yaml")
    values = draft.values
    assert (values["learner.fp8"], values["learner.fp8_bfloat16_layers"]) == ("blockwise", 0)
    assert values["rollout.engine"] == "vllm"
    assert (values["loss.router_aux_coef"], values["loss.router_z_coef"]) == (0.01, 0.001)
    assert "pictures" in draft.to_do["data.image_key"]


def test_an_asynchronous_run_is_not_called_synchronous() -> None:
    draft = from_slime(CASES / "fa2.sh")
    assert draft.values["pipeline.mode"] == "???"
    assert "pipeline.mode=async" in draft.to_do["rollout-function-path"]
    assert "multimodal-keys" in draft.to_do
    assert draft.values["loss.router_aux_coef"] == 0.01
    assert (
        of_slime("--rollout-function-path slime.rollout.sglang_rollout.generate_rollout").to_do.keys()
        == {"num-epoch"} | of_slime("").to_do.keys()
    )


def test_distillation_does_not_become_learning_from_rewards() -> None:
    draft = from_slime(CASES / "mopd.sh")
    assert {draft.values[ours] for ours in ("advantage.name", "kl.teacher", "kl.coef")} == {"???"}
    assert {"use-mopd", "mopd-distill-type"} <= draft.unknown
    enabled = of_verl({"distillation.enabled": True, "distillation.distillation_loss.topk": 32})
    assert enabled.values["kl.teacher"] == "???"
    assert {"distillation.enabled", "distillation.distillation_loss.topk"} <= set(enabled.to_do)
    off = of_verl({"distillation.enabled": False, "distillation.distillation_loss.topk": 32})
    assert "kl.teacher" not in off.values


@pytest.mark.parametrize(
    ("draft", "variables"),
    [
        (of_slime('--apply-chat-template-kwargs {"enable_thinking":false}'), {"enable_thinking": False}),
        (of_verl({"data.apply_chat_template_kwargs.enable_thinking": False}), {"enable_thinking": False}),
        (of_verl({"data.apply_chat_template_kwargs": {"a": "b"}}), {"a": "b"}),
        (of_verl({"data.apply_chat_template_kwargs": {}}), None),
        (of_verl({"data.apply_chat_template_kwargs": "x"}), "???"),
    ],
)
def test_variables_of_the_chat_template(draft: Draft, variables: Any) -> None:
    assert draft.values.get("task.chat_template_kwargs") == variables


def test_eight_bits_in_a_format_that_is_not_ours_need_a_decision() -> None:
    draft = of_verl({f"{TRANSFORMER}.fp8": "e4m3"})
    assert draft.values["learner.fp8"] == "???"
    ends = of_verl({f"{TRANSFORMER}.fp8": "hybrid", f"{TRANSFORMER}.first_last_layers_bf16": True})
    assert (ends.values["learner.fp8"], ends.values["learner.fp8_bfloat16_layers"]) == ("delayed", "???")


def test_a_composed_file_names_fields_of_pictures_that_rows_need_not_have() -> None:
    composed = of_verl({"data.image_key": "images", "data.video_key": "videos"})
    assert not {"data.image_key", "data.video_key"} & set(composed.to_do)
    assert "data.image_key" in of_verl({"data.image_key": "pictures", "data.video_key": "videos"}).to_do


def test_an_estimator_is_not_called_a_critic() -> None:
    assert "critic" not in of_slime("--advantage-estimator flash_reinforce").to_do["advantage-estimator"]


@pytest.mark.parametrize(("strategy", "bound"), [("megatron", 0.5), ("fsdp", 0.3)])
def test_the_bound_of_the_gradient_is_the_one_that_the_learner_reads(strategy: str, bound: float) -> None:
    actor = "actor_rollout_ref.actor"
    draft = of_verl({f"{actor}.strategy": strategy, f"{actor}.optim.clip_grad": 0.5, f"{actor}.grad_clip": 0.3})
    assert draft.values["optimizer.max_grad_norm"] == bound


def test_an_unknown_setting_has_an_exit_code_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("actor_rollout_ref: {model: {path: m}}\nalgorithm: {adv_estimator: grpo, brand_new: 1}\n")
    assert main(["config", "from-verl", str(file)]) == 3
    assert "1 of them unknown" in capsys.readouterr().out
    assert main(["config", "from-verl", "--accept-unknown", str(file)]) == 1
    assert "accepted so" in capsys.readouterr().out


def test_a_flag_of_several_words_or_of_none_has_no_harmless_value() -> None:
    assert [_among(value, [4]) for value in (("4",), ("4", "4"), (), 4, 5)] == [True, False, False, True, False]
