"""Prompt templates: turns of text and recordings -> token ids, and which of these are supervised."""

import json
import reprlib
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

import numpy as np

from jaxthd.config import DataConfig
from jaxthd.config.front_end import FrontEnd
from jaxthd.data.example import NO_FIELDS, Fields, Turn
from jaxthd.data.text.chat_template import ChatTemplate
from jaxthd.data.text.marks import MarksTemplate
from jaxthd.data.text.mistral import MistralTemplate, TekkenTokenizer
from jaxthd.data.text.tokenizer import FileTokenizer, Tokenizer
from jaxthd.errors import UserError

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
TEMPLATES = ("plain", "chatml", "chat_template", "mistral", "marks")
"""Values of data.template."""


class PromptTemplate:
    """Turns -> (token ids with one audio_id for each recording, True where a token is supervised).

    "plain": bos, then the turns' texts unchanged, with end_id after each assistant turn.
    "chatml": each turn as <|im_start|>role, a line break, the text, end_id, a line break.
    "chat_template": the checkpoint's own (data/text/chat_template.py), with data.template_options.
    "mistral": as mistral-common writes them (data/text/mistral.py).
    "marks": a recording, and the words of its text with marks (data/text/marks.py).
    The assistant's text and the end_id after it are supervised. end_id is one token, so that decoding can
    stop at it: in chatml <|im_end|> if the tokenizer has that token, else end-of-text. If the tokenizer has
    no token <|im_start|>, the mark is written as text. If the turns have no system turn, data.system_prompt
    comes first.

    Raises UserError on construction for an unknown data.template, and for a chat template that cannot be
    used; when called, ValueError for text that holds a special token or a mark of the template, and for an
    empty answer.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        if data.template not in TEMPLATES:
            raise UserError(
                f"data.template is {data.template!r}; expected one of {', '.join(TEMPLATES)}: correct it"
            )
        self._tokenizer = tokenizer
        self._chatml = data.template == "chatml"
        self._marks = (IM_START, IM_END) if self._chatml else ()
        self._chat = _template_of(data, tokenizer)
        end = tokenizer.encode_marks(IM_END) if self._chatml else []
        self.end_id = end[0] if len(end) == 1 else tokenizer.eos_id
        """The token that ends every assistant turn."""
        if self._chat:
            self.end_id = self._chat.end_id
        self.stop_ids = tuple(dict.fromkeys((self.end_id, *tokenizer.eos_ids)))
        """All tokens that end an answer, end_id first: what the template writes after one, and what the
        tokenizer and the files beside it name (eos_token; eos_token_id of generation_config.json and
        config.json). Validation, evaluation, generation, rollouts and exports take them from here."""
        self._system = Turn("system", (data.system_prompt,)) if data.system_prompt else None

    def check_prompts(self, data: DataConfig) -> None:
        """Raises UserError for a data.prompt or data.system_prompt that cannot be encoded.

        Whoever writes them asks first. An export of imported weights does not: their tokenizer need not have
        words for the default prompt.
        """
        pieces = [("data.prompt", piece) for piece in data.prompt.split(data.audio_placeholder)]
        for setting, piece in [("data.system_prompt", data.system_prompt), *pieces]:
            try:
                self._encode(piece)
            except ValueError as error:
                raise UserError(f"{setting}: {error}") from error

    def __call__(self, turns: Sequence[Turn], fields: Fields = NO_FIELDS) -> tuple[list[int], list[bool]]:
        """fields: of the manifest's line (Example.fields); a template may write its language."""
        turns = self._with_system(turns)
        return self._chat.written(turns, fields) if self._chat else self._written(turns)

    def prompt(self, turns: Sequence[Turn], fields: Fields = NO_FIELDS) -> list[int]:
        """Token ids of the turns up to where the assistant's next answer begins. fields, what it raises: as
        of __call__."""
        turns = self._with_system(turns)
        if self._chat:
            return self._chat.prompt(turns, fields)
        start = self._tokenizer.encode_marks(f"{IM_START}assistant\n") if self._chatml else []
        return self._written(turns)[0] + start

    def answers(
        self, turns: Sequence[Turn], texts: Sequence[str], fields: Fields = NO_FIELDS
    ) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
        """Returns (token ids of the prompt, for each text: token ids of it as the assistant's answer, its end
        included, and which of them are supervised).

        Raises as __call__ does, and ValueError where the template writes the turns otherwise before an answer
        than where one begins.
        """
        prompt, found = self.prompt(turns, fields), []
        for text in texts:
            tokens, supervised = self([*turns, Turn("assistant", (text,))], fields)
            end = max(np.flatnonzero(supervised), default=-1) + 1
            if tokens[: len(prompt)] != prompt or end <= len(prompt):
                raise ValueError(
                    f"the template writes the prompt otherwise before the answer {reprlib.repr(text)} than "
                    "before one that is to be generated; expected the same tokens: change the text, or "
                    "data.template"
                )
            found.append((tokens[len(prompt) : end], supervised[len(prompt) : end]))
        return prompt, found

    def _with_system(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        has_none = all(turn.role != "system" for turn in turns)
        return [self._system, *turns] if self._system and has_none else turns

    def _written(self, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
        tokens = [] if self._chatml else [self._tokenizer.bos_id]
        supervised = [False] * len(tokens)

        def write(ids: Sequence[int], *, is_supervised: bool = False) -> None:
            """Appends token ids that are supervised, or not."""
            tokens.extend(ids)
            supervised.extend([is_supervised] * len(ids))

        for turn in turns:
            is_answer = turn.role == "assistant"
            if self._chatml:
                write(self._tokenizer.encode_marks(f"{IM_START}{turn.role}\n"))
            start = len(tokens)
            for part in turn.parts:
                ids = self._encode(part) if isinstance(part, str) else self._tokenizer.recording
                write(ids, is_supervised=is_answer)
            if is_answer and len(tokens) == start:
                raise ValueError("an answer of the assistant is empty: the tokenizer makes no token of it")
            if is_answer or self._chatml:
                write([self.end_id], is_supervised=is_answer)
            if self._chatml:
                write(self._tokenizer.encode_marks("\n"))
        return tokens, supervised

    def _encode(self, text: str) -> list[int]:
        for mark in self._marks:
            if mark in text:
                raise ValueError(
                    f"text {reprlib.repr(text)} holds {mark}, a mark of the template; remove it from the text"
                )
        return self._tokenizer.encode(text)


def as_jinja(data: DataConfig, tokenizer: Tokenizer) -> str | None:
    """The template as a chat template in Jinja, which transformers and vLLM read; None where it is the
    checkpoint's own, or none of a chat.

    tokenizer: whose tokens its marks are.
    """
    if data.template in ("chat_template", "marks") or not isinstance(tokenizer, FileTokenizer):
        return None
    written = PromptTemplate(data, tokenizer)
    start, end = tokenizer.token_text(tokenizer.bos_id), tokenizer.token_text(written.end_id)
    system = json.dumps(data.system_prompt, ensure_ascii=False)
    first = f"{{{{ {system} }}}}"
    if data.template == "chatml":
        turn = f"{IM_START}{{{{ message['role'] + '\\n' + message['content'] }}}}{end}{{{{ '\\n' }}}}"
        first = f"{IM_START}{{{{ 'system\\n' + {system} }}}}{end}{{{{ '\\n' }}}}"
        start, last = "", f"{IM_START}{{{{ 'assistant\\n' }}}}"
    else:
        turn = f"{{{{ message['content'] }}}}{{% if message['role'] == 'assistant' %}}{end}{{% endif %}}"
        last = ""
    has_none = "{% if messages | selectattr('role', 'equalto', 'system') | list | length == 0 %}"
    return "".join(
        [
            start,
            f"{has_none}{first}{{% endif %}}" if data.system_prompt else "",
            f"{{% for message in messages %}}{turn}{{% endfor %}}",
            f"{{% if add_generation_prompt %}}{last}{{% endif %}}" if last else "",
        ]
    )


def answer_of(tokens: Sequence[int], stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """Returns (the tokens before the first that ends an answer, whether there is one that ends it)."""
    kept = list(takewhile(lambda token: token not in stop_ids, tokens))
    return kept, len(kept) < len(tokens)


def _template_of(
    data: DataConfig, tokenizer: Tokenizer
) -> ChatTemplate | MistralTemplate | MarksTemplate | None:
    """The template that writes whole conversations, if data.template is one."""
    if data.template == "mistral":
        if not isinstance(tokenizer, TekkenTokenizer):
            raise UserError(
                f'data.template is "mistral" with data.tokenizer {data.tokenizer!r}; expected a tekken.json, '
                "or a folder with one: correct data.tokenizer, or choose another data.template"
            )
        return MistralTemplate(tokenizer)
    if data.template == "marks":
        return MarksTemplate(tokenizer)
    if data.template != "chat_template":
        return None
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(
            f'data.template is "chat_template" with data.tokenizer {data.tokenizer!r}, which has none; '
            "expected the folder of a checkpoint: correct data.tokenizer, or choose another data.template"
        )
    return ChatTemplate(tokenizer, data.template_variables, data.template_source)


def mark_ids(
    front_end: FrontEnd, tokenizer: Tokenizer, audio_tokens: Iterable[int]
) -> list[list[tuple[int, list[int]]]]:
    """(the number of audio tokens before it, its token ids) of each text between a recording's audio tokens
    (FrontEnd.marks), for each recording. audio_tokens: of each."""
    return [
        [(before, tokenizer.encode(text)) for before, text in front_end.marks(tokens)]
        for tokens in audio_tokens
    ]
