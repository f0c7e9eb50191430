"""What a dispatch of the decode loop gives."""

from typing import NamedTuple

import jax

from kvjax.generation.choosing import Progress
from kvjax.generation.drafts.acceptance import Acceptance
from kvjax.sampling.scores import Scores


class Report(NamedTuple):
    """Of a dispatch: the tokens it chose, int32[batch, chunk], where the rows stand after it, the
    tokens' scores, where they were asked for, and how drafts fare, where there are any."""

    tokens: jax.Array
    progress: Progress
    scores: Scores | None
    drafted: Acceptance | None
