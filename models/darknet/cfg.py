"""Parser of a Darknet cfg: sections and options.

The rules are those of Darknet's `parser.c` (github.com/AlexeyAB/darknet): it ignores white space, `#` and `;` begin comments, and
the first of several equal options counts. The importer uses an option, knows that it matters in training only, or reports an
error. So it ignores nothing that would change the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator


class DarknetError(ValueError):
    """A cfg, weights or names file cannot be imported; the message has one line: what was expected and what came."""


@dataclasses.dataclass(frozen=True)
class _Known:
    """The options of a kind of section.

    Attributes:
      read: The importer uses them.
      ignored: They matter in training or to Darknet's own programs only.
      neutral: `option=value`: this value changes nothing; any other value is an error.
    """

    read: str
    ignored: str = ""
    neutral: str = ""


_IGNORED_IN_ALL = "clip learning_rate onlyforward dont_update burnin_update stopbackward train_only_bn dontsave"

_ALIASES = {"network": "net", "conv": "convolutional", "max": "maxpool"}

_KNOWN = {
    "net": _Known(
        read="width height channels letter_box",
        ignored="""batch subdivisions time_steps momentum decay angle saturation exposure hue burn_in max_batches policy steps
            scales seq_scales step scale power gamma sgdr_cycle sgdr_mult max_crop min_crop aspect center flip blur gaussian_noise
            mixup cutmix mosaic mosaic_bound contrastive contrastive_jit_flip contrastive_color unsupervised adversarial_lr
            attention ema_alpha adam b1 b2 eps B1 B2 optimized_memory workspace_size_limit_MB dynamic_minibatch random
            resize_step track augment_speed sequential_subdivisions init_sequential_subdivisions try_fix_nan loss_scale
            label_smooth_eps weights_reject_freq equidistant_point badlabels_rejection_percentage num_sigmas_reject_badlabels
            use_cuda_graph all_layers max_chart_loss num_boxes jitter inputs""",
    ),
    "convolutional": _Known(
        read="filters size stride stride_x stride_y pad padding groups batch_normalize activation",
        ignored="dot grad_centr angle",
        neutral="""antialiasing=0 assisted_excitation=0 bin_output=0 binary=0 cbn=0 deform=0 dilation=1 dontload=0
            dontloadscales=0 flipped=0 reverse=0 rotate=0 stretch=0 stretch_sway=0 sway=0 xnor=0""",
    ),
    "maxpool": _Known(read="size stride stride_x stride_y padding", neutral="antialiasing=0 maxpool_depth=0"),
    "upsample": _Known(read="stride", neutral="scale=1"),
    "route": _Known(read="layers groups group_id", ignored="stream"),
    "shortcut": _Known(read="from activation", ignored="weights_normalization", neutral="weights_type=none"),
    "dropout": _Known(read="", ignored="probability dropblock dropblock_size_rel dropblock_size_abs"),
    "yolo": _Known(
        read="mask anchors classes num scale_x_y new_coords",
        ignored="""jitter resize random ignore_thresh truth_thresh iou_thresh iou_thresh_kind iou_loss iou_normalizer
            cls_normalizer obj_normalizer uc_normalizer delta_normalizer max_delta objectness_smooth label_smooth_eps focal_loss
            max beta_nms nms_kind counters_per_class map show_details absolute""",
    ),
}


@dataclasses.dataclass(frozen=True)
class Section:
    """A `[kind]` of a cfg with its options.

    Attributes:
      kind: Name of the section; Darknet's short forms are spelled out.
      line: Its line in the cfg.
      options: Value and line of each option.
    """

    kind: str
    line: int
    options: dict[str, tuple[str, int]]

    def error(self, text: str, option: str = "") -> DarknetError:
        """An error at an option, or at the section without that option."""
        return DarknetError(f"line {self.options[option][1] if option in self.options else self.line}: {text}")

    def text(self, name: str, default: str | None = None) -> str:
        """Value of an option; without a default a missing option is an error."""
        if name in self.options:
            return self.options[name][0]
        if default is None:
            raise self.error(f"[{self.kind}] needs the option {name}=")
        return default

    def integer(self, name: str, default: int | str | None = None, minimum: int = 0) -> int:
        """Value of an option that is one integer, at least `minimum`."""
        value = self.integers(name, None if default is None else str(default))
        if len(value) != 1 or value[0] < minimum:
            raise self.error(f"{name}={self.text(name)}: expected one integer from {minimum}", name)
        return value[0]

    def integers(self, name: str, default: str | None = None) -> tuple[int, ...]:
        """Value of an option that is one or more integers."""
        numbers = self.numbers(name, default)
        if any(number != int(number) for number in numbers):
            raise self.error(f"{name}={self.text(name)}: expected integers", name)
        return tuple(int(number) for number in numbers)

    def numbers(self, name: str, default: str | None = None) -> tuple[float, ...]:
        """Value of an option that is one or more numbers."""
        text = self.text(name, default)
        try:
            numbers = tuple(float(part) for part in text.split(",") if part)
        except ValueError:
            numbers = ()
        if not numbers or not all(map(math.isfinite, numbers)):
            raise self.error(f"{name}={text}: expected a number, or numbers with commas between", name)
        return numbers

    def check(self) -> None:
        """Raises DarknetError for unknown kinds and options, and for unsupported options that would change the result."""
        if self.kind not in _KNOWN:
            raise self.error(f"section [{self.kind}] is not supported, only [{'], ['.join(_KNOWN)}]")
        known = _KNOWN[self.kind]
        harmless = {*known.read.split(), *known.ignored.split(), *_IGNORED_IN_ALL.split()}
        neutral = dict(option.split("=") for option in known.neutral.split())
        for name, (value, _) in self.options.items():
            if name in neutral and value != neutral[name]:
                raise self.error(f"{name}={value} in [{self.kind}] is not supported, only {name}={neutral[name]}", name)
            if name not in harmless and name not in neutral:
                raise self.error(f"option {name}= in [{self.kind}] is not known", name)


def read_sections(text: str) -> list[Section]:
    """The sections of a cfg, in order; raises DarknetError for malformed or unknown ones."""
    sections = list(_split(text))
    for section in sections:
        section.check()
    return sections


def _split(text: str) -> Iterator[Section]:
    section: Section | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = "".join(raw.split("#")[0].split())  # Darknet removes all white space
        if not line or line[0] == ";":
            continue
        if line[0] == "[":
            if section:
                yield section
            kind = line.strip("[]").lower()
            section = Section(_ALIASES.get(kind, kind), number, {})
            continue
        name, equals, value = line.partition("=")
        if not (section and name and equals):
            raise DarknetError(f"line {number}: expected [section] or option=value, got {raw.strip()[:60]!r}")
        section.options.setdefault(name, (value, number))  # Darknet takes the first of several
    if section:
        yield section
