"""Configuration of off-policy correction; verl's names and presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.formulas import Aggregate, Estimator
from torchrl_sglang.support.checks import (
    check_choice,
    check_count,
    check_flag,
    check_positive,
    suggest,
)

REJECTIONS = tuple(
    f"{aggregate}_{estimator}"
    for aggregate in get_args(Aggregate)
    for estimator in get_args(Estimator)
    if (aggregate, estimator) != ("seq_max", "k1")
)
"""Values of ``rollout_rs``: scope of the aggregation and estimator."""

Threshold = str | float | tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A criterion of rejection sampling."""

    name: str
    """verl's name, from :data:`REJECTIONS`."""
    bounds: tuple[float, float]
    """Bounds of the ratio for k1, of the divergence otherwise."""

    @property
    def aggregate(self) -> Aggregate:
        """Scope of the statistic: a token, the sum over a sequence, ..."""
        return cast("Aggregate", self.name.rpartition("_")[0])

    @property
    def estimator(self) -> Estimator:
        """The estimator of the divergence."""
        return cast("Estimator", self.name.rpartition("_")[2])


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """Methods of off-policy correction, by verl's names.

    Three policies take part: the policy at sampling (rollout), the policy at the begin
    of the training step (old, or proximal), and the policy in training. In decoupled
    mode the loss clips the ratio of the last two and the first gap is corrected by
    weights and masks. In bypass mode the old policy is the rollout policy.

    :class:`.OffPolicyCorrection` applies a configuration. The name of a preset can be
    given instead of a configuration.

    Args:
        rollout_is: level of the importance weights: ``"token"``, ``"sequence"`` or
            None for no weights. Defaults to ``"sequence"``, as in verl.
        rollout_is_threshold: a number is the largest weight (TIS); a pair, as a tuple
            or as ``"0.5_5.0"``, is the range outside of which weights are zero
            (IcePop). Defaults to 2.0.
        rollout_is_batch_normalize: whether weights are divided by their mean over the
            batch. Defaults to False.
        rollout_rs: comma-separated criteria of rejection sampling: each is ``token``,
            ``seq_sum``, ``seq_mean`` or ``seq_max``, and ``_k1``, ``_k2`` or ``_k3``;
            there is no ``seq_max_k1``. Defaults to None.
        rollout_rs_threshold: comma-separated, for each criterion, or for all: the range
            of the ratio for k1, as ``"0.5_2.0"`` or the upper bound alone, and the
            largest divergence for k2 and k3. Required with ``rollout_rs``.
        bypass_mode: whether the rollout policy is the old policy. Defaults to False.
        loss_type: in bypass mode, ``"ppo_clip"``, for which the loss's own ratio is the
            importance weight, or ``"reinforce"``, which applies the weights and does
            not clip. Defaults to ``"ppo_clip"``.
        proximal: in decoupled mode, the source of the old policy's log-probs:
            ``"recomputed"`` by the trainer before the step, or ``"interpolated"``
            between rollout and training policy by the weight version of each token.
            Defaults to ``"recomputed"``.
        veto_threshold: drops sequences with a token whose ratio is below this, such as
            1e-4. Defaults to None.
        dppo_threshold: drops tokens whose probability has moved further than this, in
            the direction of the advantage: DPPO with the binary total variation, 0.2 in
            prime-rl; or a tuple for negative and positive advantages. The tokens stay
            in the denominator. Defaults to None.
        max_staleness: drops tokens whose weights are more than this many versions older
            than the trainer's, or of unknown version. Defaults to None.
        rejected: ``"masked"`` removes tokens of rejection, veto and staleness from the
            loss and its denominator, as verl does; ``"zeroed"`` keeps them in the
            denominator, as AReaL and TRL do. Defaults to ``"masked"``.

    Raises:
        ConfigurationError: if a value is invalid.

    Examples:
        >>> preset = RolloutCorrectionConfig.preset(
        ...     "decoupled_geo_rs_token_tis", rollout_is_threshold=3.0
        ... )
        >>> preset.rollout_rs, preset.weight_bounds
        ('seq_mean_k1', (None, 3.0))
        >>> config = RolloutCorrectionConfig(
        ...     rollout_is="token", rollout_rs="token_k3", rollout_rs_threshold=0.1
        ... )
        >>> config.weight_bounds, config.rejections[0].bounds
        ((None, 2.0), (0.0, 0.1))
    """

    rollout_is: Literal["token", "sequence"] | None = "sequence"
    rollout_is_threshold: Threshold = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: Threshold | None = None
    bypass_mode: bool = False
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    veto_threshold: float | None = None
    dppo_threshold: float | tuple[float, float] | None = None
    max_staleness: int | None = None
    rejected: Literal["masked", "zeroed"] = "masked"

    def __post_init__(self) -> None:
        """Checks every value."""
        if self.rollout_is is not None:
            check_choice("rollout_is", self.rollout_is, ("token", "sequence"))
        check_choice("loss_type", self.loss_type, ("ppo_clip", "reinforce"))
        check_choice("proximal", self.proximal, ("recomputed", "interpolated"))
        check_choice("rejected", self.rejected, ("masked", "zeroed"))
        check_flag("rollout_is_batch_normalize", self.rollout_is_batch_normalize)
        check_flag("bypass_mode", self.bypass_mode)
        if self.max_staleness is not None:
            check_count("max_staleness", self.max_staleness, least=0)
        if self.veto_threshold is not None:
            check_positive("veto_threshold", self.veto_threshold)
        # These properties parse and check their values.
        _ = self.weight_bounds, self.rejections, self.dppo_bounds
        if self.bypass_mode and self.proximal == "interpolated":
            raise ConfigurationError(
                "proximal='interpolated' is for decoupled mode, and bypass_mode=True "
                "has no proximal policy; leave one of them out."
            )

    @property
    def weight_bounds(self) -> tuple[float | None, float]:
        """Lower bound, for IcePop, and upper bound of the weights."""
        bounds = _numbers("rollout_is_threshold", self.rollout_is_threshold)
        return bounds if len(bounds) == 2 else (None, bounds[0])

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria of rejection sampling."""
        if self.rollout_rs is None:
            if self.rollout_rs_threshold is not None:
                raise ConfigurationError(
                    f"rollout_rs_threshold={self.rollout_rs_threshold!r} has no effect "
                    f"without rollout_rs; name a criterion, such as 'seq_mean_k1'."
                )
            return ()
        names = list(dict.fromkeys(_split(self.rollout_rs)))
        thresholds = self.rollout_rs_threshold
        specs: list[Any] = (
            _split(thresholds) if isinstance(thresholds, str) else [thresholds]
        )
        if len(specs) == 1:
            specs *= len(names)
        if thresholds is None or not names or len(specs) != len(names):
            raise ConfigurationError(
                f"rollout_rs={self.rollout_rs!r} needs one threshold, or one for each "
                f"criterion, in rollout_rs_threshold, got {thresholds!r}."
            )
        return tuple(map(_rejection, names, specs))

    @property
    def dppo_bounds(self) -> tuple[float, float] | None:
        """Bounds of the total variation for negative and positive advantages."""
        value = self.dppo_threshold
        if value is None:
            return None
        low, high = value if isinstance(value, tuple) else (value, value)
        return check_positive("dppo_threshold", low), check_positive(
            "dppo_threshold", high
        )

    @property
    def applies_weights(self) -> bool:
        """Whether the importance weights enter the loss.

        With PPO's clipping in bypass mode, the loss's own ratio is the weight.
        """
        clipped = self.bypass_mode and self.loss_type == "ppo_clip"
        return self.rollout_is is not None and not clipped

    @property
    def needs_train_log_probs(self) -> bool:
        """Whether the log-probs of the trainer's policy are needed."""
        compared = (self.rollout_is, self.rollout_rs, self.veto_threshold)
        replaced = not self.bypass_mode or self.loss_type == "reinforce"
        some = any(value is not None for value in (*compared, self.dppo_threshold))
        return replaced or some

    @property
    def recomputes(self) -> bool:
        """Whether the old policy is recomputed before the step."""
        return not self.bypass_mode and self.proximal == "recomputed"

    @property
    def needs_versions(self) -> bool:
        """Whether the weight version of each token is needed."""
        return self.max_staleness is not None or self.proximal == "interpolated"

    @classmethod
    def preset(cls, name: str, **changes: Any) -> RolloutCorrectionConfig:
        """Returns a preset, with other values of some arguments.

        Args:
            name: key of ``PRESETS``.
            **changes: arguments of this class.

        Raises:
            ConfigurationError: if there is no such preset, or a value is invalid.
        """
        if not isinstance(name, str) or name not in PRESETS:
            hint = suggest(str(name), PRESETS) or f" Presets are {', '.join(PRESETS)}."
            raise ConfigurationError(f"{name!r} is not a preset of a correction.{hint}")
        return cls(**{**PRESETS[name], **changes})


_NO_WEIGHTS = {"rollout_is": None}
_TOKEN_TIS = {"rollout_is": "token"}
_SEQUENCE_TIS = {"rollout_is": "sequence"}
_TOKEN_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": (0.5, 5.0)}
_PRODUCT = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEOMETRIC_MEAN = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_CLIP = {"bypass_mode": True}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "decoupled_token_is": _TOKEN_TIS,
    "decoupled_seq_is": _SEQUENCE_TIS,
    "decoupled_token_icepop": _TOKEN_ICEPOP,
    "decoupled_seq_is_rs": {**_SEQUENCE_TIS, **_PRODUCT},
    "decoupled_geo_rs": {**_NO_WEIGHTS, **_GEOMETRIC_MEAN},
    "decoupled_geo_rs_seq_tis": {**_SEQUENCE_TIS, **_GEOMETRIC_MEAN},
    "decoupled_geo_rs_token_tis": {**_TOKEN_TIS, **_GEOMETRIC_MEAN},
    "decoupled_k3_rs": {**_NO_WEIGHTS, **_K3},
    "decoupled_k3_rs_seq_tis": {**_SEQUENCE_TIS, **_K3},
    "decoupled_k3_rs_token_tis": {**_TOKEN_TIS, **_K3},
    "bypass_ppo_clip": {**_CLIP, **_NO_WEIGHTS},
    "bypass_ppo_clip_geo_rs": {**_CLIP, **_NO_WEIGHTS, **_GEOMETRIC_MEAN},
    "bypass_ppo_clip_k3_rs": {**_CLIP, **_NO_WEIGHTS, **_K3},
    "bypass_pg_is": {**_REINFORCE, **_SEQUENCE_TIS},
    "bypass_pg_token_icepop": {**_REINFORCE, **_TOKEN_ICEPOP},
    "bypass_pg_geo_rs": {**_REINFORCE, **_NO_WEIGHTS, **_GEOMETRIC_MEAN},
    "bypass_pg_geo_rs_seq_tis": {**_REINFORCE, **_SEQUENCE_TIS, **_GEOMETRIC_MEAN},
    "bypass_pg_geo_rs_token_tis": {**_REINFORCE, **_TOKEN_TIS, **_GEOMETRIC_MEAN},
    # Nothing is corrected: for the metrics alone.
    "disabled": _NO_WEIGHTS,
}
"""verl's name of a preset -> arguments of its configuration."""


def as_config(value: RolloutCorrectionConfig | str) -> RolloutCorrectionConfig:
    """Returns a configuration, or the configuration of a preset."""
    if isinstance(value, str):
        return RolloutCorrectionConfig.preset(value)
    if isinstance(value, RolloutCorrectionConfig):
        return value
    raise ConfigurationError(
        f"A correction is a RolloutCorrectionConfig or the name of a preset, got "
        f"{value!r}."
    )


def _numbers(name: str, value: Any) -> tuple[float] | tuple[float, float]:
    """Returns a bound, or a lower and an upper bound, from a number or verl's text."""
    parts: list[Any] = list(value) if isinstance(value, tuple) else [value]
    if isinstance(value, str):
        try:
            parts = [float(part) for part in value.split("_")]
        except ValueError:
            parts = []
    if len(parts) not in (1, 2):
        raise ConfigurationError(
            f"{name} must be a number, or two as in '0.5_2.0', got {value!r}."
        )
    bounds = [check_positive(name, part) for part in parts]
    if len(bounds) == 1:
        return (bounds[0],)
    if bounds[0] > bounds[1]:
        raise ConfigurationError(
            f"{name} must have its lower bound first, got {value!r}."
        )
    return bounds[0], bounds[1]


def _split(text: str) -> list[str]:
    """Returns the parts between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _rejection(name: str, threshold: Any) -> Rejection:
    if name not in REJECTIONS:
        hint = suggest(name, REJECTIONS) or f" Criteria are {', '.join(REJECTIONS)}."
        raise ConfigurationError(f"rollout_rs has no criterion {name!r}.{hint}")
    *lower, upper = _numbers("rollout_rs_threshold", threshold)
    if not name.endswith("k1"):
        if lower:
            raise ConfigurationError(
                f"rollout_rs={name!r} has an upper bound only, got {threshold!r}."
            )
        return Rejection(name=name, bounds=(0.0, upper))
    if lower:
        return Rejection(name=name, bounds=(lower[0], upper))
    if upper < 1:
        raise ConfigurationError(
            f"The upper bound of a ratio, of which the lower one is the reciprocal, is "
            f"at least 1, got {upper!r} for {name!r}; give both, as in '0.5_2.0'."
        )
    return Rejection(name=name, bounds=(1 / upper, upper))
