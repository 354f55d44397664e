"""Turns written by a checkpoint's own chat template, and which of its tokens are the assistant's.

A template returns text. Unless it has generation tags, it does not say which part of the text is an answer.
Without them, each text of the turns is replaced by a sign, one at a time, and the span where the sign appears
is the span of the text. An answer begins where the prompt for it ends, so it includes what the template
writes before the answer's text. It ends with the token that ends the answer, if generation ends there too:
GPT-OSS's template writes <|return|> after the last answer, and after earlier ones <|end|>, at which no
decoding stops, since it also ends thoughts. Where a template writes no special token after the last answer,
the tokenizer's end-of-text token follows it.

The template of a speech recogniser may write recordings alone: what the user says beside them is refused. If
it leaves out answers too (Qwen3-ASR), the last turn's follows the prompt, and the end-of-text token follows
that, as in the published training.
"""

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from jaxthd.data.example import NO_FIELDS, Fields, Turn
from jaxthd.data.text.render import SUPERVISED, SUPERVISED_END, Renderer, RenderError
from jaxthd.data.text.tokenizer import FileTokenizer
from jaxthd.errors import UserError

_SIGN, _RECORDING = "\ufdd3", "\ufdd0"
"""Signs for a text, and for a recording if the tokenizer has no token for one. Unicode assigns them to no
character, so no text has them."""
_RESERVED = frozenset((_SIGN, _RECORDING, SUPERVISED, SUPERVISED_END))
_AUDIO_PART = {"type": "audio", "audio": ""}

Span = tuple[int, int]
"""(start, end), in characters."""


class _Token(NamedTuple):
    """A token and the characters, start to end, that it stands for."""

    id: int
    start: int
    end: int


class _Rendered(NamedTuple):
    """The text that a template returns. supervised: the spans that its generation tags mark."""

    text: str
    supervised: list[Span]


class ChatTemplate:
    """Turns -> token ids as transformers' apply_chat_template gives them: the whole text is encoded at once.

    options: variables of the template, such as enable_thinking, besides the checkpoint's special tokens.
    source: of a template in place of the checkpoint's.
    The template gets a turn's content as a string with placeholders for recordings; or, if it reads these, as
    a list of {"type": "audio"} and {"type": "text"}. A recording becomes tokenizer.recording.
    end_id: the token that the template writes after an answer.

    Raises UserError, on construction and when used, for a template that fails, or that omits a text or the
    end of an answer. When used, raises ValueError for an empty answer, and for a text that makes a special
    token, alone or together with what the template writes beside it.
    """

    def __init__(self, tokenizer: FileTokenizer, options: Mapping[str, Any], source: str = "") -> None:
        source = source or tokenizer.special.chat_template or ""
        if not source:
            raise UserError(
                f'data.template is "chat_template" and there is none beside {tokenizer.path}; expected a '
                "chat_template.jinja, or a chat_template in tokenizer_config.json: choose another "
                "data.template, or let data.tokenizer be the folder of a checkpoint that has one"
            )
        self._tokenizer, self._renderer = tokenizer, Renderer(source)
        self._variables = {**tokenizer.special.tokens, **options, "tools": None, "documents": None}
        self._mark = tokenizer.audio_text or _RECORDING
        self._has_strings = self._writes(_SIGN, 0)
        self._hears_alone = False
        if not self._has_strings and not self._writes([_text(_SIGN)], 0):
            self._hears_alone = self._writes([_AUDIO_PART, _text(_SIGN)], 1, signs=0)
            if not self._hears_alone:
                self._rendered([([{"role": "user", "content": _SIGN}], True)])  # may raise the reason
                raise UserError(self._complaint("leaves out what the user says"))
        self._has_recordings = self._hears_alone or self._writes([_AUDIO_PART, _text(_SIGN)], 1)
        self._has_answers = self._has_ends = True
        self.end_id = tokenizer.eos_id
        self.end_id = self._find_end()

    def prompt(self, turns: Sequence[Turn], fields: Fields = NO_FIELDS) -> list[int]:
        """Token ids of the turns, and of what the template writes before the assistant's answer to them.
        fields: not told to templates."""
        self._check_texts(turns)
        signed = self._signed(turns).values()
        whole, *others = self._render([(turns, True), *((other, True) for other in signed)])
        tokens = self._encode(whole.text, turns)
        self._check_specials(whole.text, tokens, [_span_of(whole, other) for other in others])
        return self._expanded(tokens, [False] * len(tokens))[0]

    def written(self, turns: Sequence[Turn], fields: Fields = NO_FIELDS) -> tuple[list[int], list[bool]]:
        """Returns (token ids of the conversation, whether each is supervised). Answers and their ends are."""
        self._check_texts(turns)
        if not self._has_answers:
            return self._answered(turns)
        signed = self._signed(turns)
        asked = [k for k, turn in enumerate(turns) if turn.role == "assistant" and k]
        others = [*((other, False) for other in signed.values()), *((turns[:k], True) for k in asked)]
        whole, *rendered = self._render([(turns, False), *others])
        spans = {at: _span_of(whole, other) for at, other in zip(signed, rendered, strict=False)}
        prompts = {k: other.text for k, other in zip(asked, rendered[len(signed) :], strict=True)}
        tokens = self._encode(whole.text, turns)
        self._check_specials(whole.text, tokens, spans.values())
        supervised = [False] * len(tokens)
        for start, end in whole.supervised or self._answers(whole.text, turns, spans, prompts):
            self._supervise(tokens, supervised, start, end)
        ids, marks = self._expanded(tokens, supervised)
        has_end = self._has_ends or turns[-1].role != "assistant"
        return (ids, marks) if has_end else ([*ids, self.end_id], [*marks, True])

    def _answered(self, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
        """As `written`, of turns whose only answer is the last one, by a template that leaves it out."""
        *asked, last = turns
        if any(turn.role == "assistant" for turn in asked) or not asked:
            raise UserError(self._complaint("leaves out answers, and the last turn's is not the only one"))
        prompt = self.prompt(asked)
        if last.role != "assistant":
            return prompt, [False] * len(prompt)
        answer = [*self._tokenizer.encode(str(last.parts[0])), self.end_id]
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)

    def _answers(
        self,
        text: str,
        turns: Sequence[Turn],
        spans: Mapping[tuple[int, int], Span | None],
        prompts: Mapping[int, str],
    ) -> Iterator[Span]:
        """Yields the answers' spans in the text. They include what the template writes before each answer."""
        for k, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            asked = prompts.get(k, text)
            start, end = (
                spans[k, 0]
                or self._rewritten_span(text, turns, k, asked, spans)
                or self._only_span(text, str(turn.parts[0]).strip())
            )
            # If the text starts with the prompt, all that follows it is generated. Otherwise the prompt
            # does not say where the answer begins.
            yield (len(asked) if text.startswith(asked) and len(asked) < end else start), end

    def _rewritten_span(
        self,
        text: str,
        turns: Sequence[Turn],
        k: int,
        asked: str,
        spans: Mapping[tuple[int, int], Span | None],
    ) -> Span | None:
        """The span of the answer of turn k where the template rewrites it, as thoughts by Qwen3's.

        It ends where a sign at the answer's end appears, and starts where the text departs from the prompt
        for it. None if the template writes the answer as it is, or if that is not after the texts before.
        """
        answer = str(turns[k].parts[0])
        before = max((span[1] for (turn, _), span in spans.items() if turn < k and span), default=None)
        if before is None or text.count(answer.strip()) == 1:
            return None
        ended = [*turns[:k], Turn("assistant", (answer.rstrip() + _SIGN,)), *turns[k + 1 :]]
        end = _span_of(_Rendered(text, []), *self._render([(ended, False)]))
        start = next((i for i, (a, b) in enumerate(zip(text, asked, strict=False)) if a != b), len(asked))
        return (start, end[1]) if end and before <= start < end[1] else None

    def _only_span(self, text: str, answer: str) -> Span:
        """The span of the answer's only occurrence.

        For templates whose text around an answer depends on the answer.
        """
        count = text.count(answer)
        if count != 1:
            raise UserError(
                self._complaint(
                    f"changes the answer {reprlib.repr(answer)}, or what is around it, and the text holds it "
                    f"{count} times: which tokens are the assistant's cannot be told"
                )
            )
        start = text.index(answer)
        return start, start + len(answer)

    def _supervise(self, tokens: Sequence[_Token], supervised: list[bool], start: int, end: int) -> None:
        """Marks as supervised the tokens of a span, and those up to the token that ends the answer."""

        def begins(token: _Token) -> bool:
            """Whether it starts in the span or reaches into it, as in transformers' assistant_masks."""
            return token.start >= start or (token.end > start and not self._is_mark(token))

        first = next((i for i, token in enumerate(tokens) if begins(token)), len(tokens))
        last = next((i for i in range(first, len(tokens)) if tokens[i].start >= end), len(tokens))
        if first == last:
            raise ValueError("an answer of the assistant is empty: the tokenizer makes no token of it")
        if not self._ends(tokens[last - 1]):
            after = next((i for i in range(last, len(tokens)) if self._is_mark(tokens[i])), None)
            if after is not None and self._ends(tokens[after]):
                last = after + 1
        supervised[first:last] = [True] * (last - first)

    def _is_mark(self, token: _Token) -> bool:
        return self._tokenizer.is_special(token.id) or self._ends(token)

    def _ends(self, token: _Token) -> bool:
        return token.id == self.end_id or token.id in self._tokenizer.eos_ids

    def _find_end(self) -> int:
        turns = (Turn("user", ("Is it?",)), Turn("assistant", ("It is so.",)))
        signed = (turns[0], Turn("assistant", (_SIGN,)))
        whole, other = self._render([(turns, False), (signed, False)])
        if self._hears_alone and _SIGN not in other.text:
            self._has_answers = False
            return self._tokenizer.eos_id
        _, answered = _span_of(whole, other) or self._only_span(whole.text, "It is so.")
        tokens = [token for token in self._encode(whole.text, turns) if token.start >= answered]
        end = next((token.id for token in tokens if self._is_mark(token)), None)
        self._has_ends = end is not None
        return self._tokenizer.eos_id if end is None else end

    # --- text ---

    def _render(self, conversations: Sequence[tuple[Sequence[Turn], bool]]) -> list[_Rendered]:
        """Renders each (turns, whether the prompt for the assistant's answer is added)."""
        texts = self._rendered([(list(map(self._message, turns)), ask) for turns, ask in conversations])
        return list(map(_unmarked, texts))

    def _rendered(self, conversations: Sequence[tuple[list[dict[str, Any]], bool]]) -> list[str]:
        try:
            return self._renderer(
                [{**self._variables, "messages": m, "add_generation_prompt": ask} for m, ask in conversations]
            )
        except RenderError as error:
            raise UserError(self._complaint(f"fails: {error}")) from error

    def _complaint(self, what: str) -> str:
        return (
            f"the chat template beside {self._tokenizer.path} {what}; correct the template, the text or "
            'data.template_options, or choose data.template "chatml" or "plain"'
        )

    def _message(self, turn: Turn) -> dict[str, Any]:
        """The turn as a message in the form of transformers."""
        texts = [part if isinstance(part, str) else None for part in turn.parts]
        if self._has_strings and not (self._has_recordings and None in texts):
            return {"role": turn.role, "content": "".join(self._mark if t is None else t for t in texts)}
        return {"role": turn.role, "content": [_AUDIO_PART if t is None else _text(t) for t in texts]}

    def _writes(self, content: Any, recordings: int, signs: int = 1) -> bool:
        """Whether a message with this content becomes a text with so many signs and recordings."""
        try:
            (text,) = self._rendered([([{"role": "user", "content": content}], True)])
        except UserError:
            return False
        return text.count(_SIGN) == signs and text.count(self._mark) == recordings

    def _signed(self, turns: Sequence[Turn]) -> dict[tuple[int, int], list[Turn]]:
        """For each text, by (turn, part) numbers: the turns with the sign in place of that text."""

        def sign(k: int, p: int) -> list[Turn]:
            """Returns the turns with the sign in place of part `p` of turn `k`."""
            parts = (*turns[k].parts[:p], _SIGN, *turns[k].parts[p + 1 :])
            return [*turns[:k], Turn(turns[k].role, parts), *turns[k + 1 :]]

        texts = (
            (k, p) for k, turn in enumerate(turns) for p, t in enumerate(turn.parts) if isinstance(t, str)
        )
        return {at: sign(*at) for at in texts}

    def _check_texts(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            for part in turn.parts:
                if isinstance(part, str):
                    if not _RESERVED.isdisjoint(part):
                        raise ValueError(f"text {part!a} holds what Unicode assigns to no character")
                    self._tokenizer.encode(part)
            if turn.role == "user" and self._hears_alone and any(isinstance(x, str) for x in turn.parts):
                raise ValueError(
                    "the chat template writes recordings alone, and the user says more: set data.prompt to "
                    "the placeholder alone"
                )
            if turn.role == "assistant":
                answer = turn.parts[0] if len(turn.parts) == 1 else None
                if not isinstance(answer, str) or not answer.strip():
                    raise ValueError("an answer of the assistant is empty, or not one text")

    # --- tokens ---

    def _encode(self, text: str, turns: Sequence[Turn]) -> list[_Token]:
        """Encodes the template's text. Raises UserError if its number of recordings is not the turns'."""
        tokens: list[_Token] = []
        at = 0
        for piece in text.split(_RECORDING):
            if at:
                tokens.append(_Token(self._tokenizer.audio_id, at - 1, at))
            ids, spans = self._tokenizer.encode_spans(piece)
            tokens += [_Token(i, at + a, at + b) for i, (a, b) in zip(ids, spans, strict=True)]
            at += len(piece) + 1
        found = sum(token.id == self._tokenizer.audio_id for token in tokens)
        wanted = sum(not isinstance(part, str) for part in chain(*(turn.parts for turn in turns)))
        if found != wanted:
            raise UserError(self._complaint(f"writes {found} recordings; expected {wanted}"))
        return tokens

    def _check_specials(self, text: str, tokens: Sequence[_Token], spans: Iterable[Span | None]) -> None:
        """Raises ValueError if a special token covers part of a turn's text.

        Spaces that the token absorbs around its own text do not count.
        """
        marks = []
        for token in tokens:
            if self._tokenizer.is_special(token.id) and token.id != self._tokenizer.audio_id:
                name = self._tokenizer.token_text(token.id)
                start = token.start + max(text[token.start : token.end].find(name), 0)
                marks.append((start, start + len(name), name))
        for span in filter(None, spans):
            for start, end, name in marks:
                if start < span[1] and span[0] < end:
                    raise ValueError(
                        f"text {reprlib.repr(text[span[0] : span[1]])} makes the special token {name} with "
                        "what the chat template writes beside it; change the text"
                    )

    def _expanded(self, tokens: Sequence[_Token], supervised: Sequence[bool]) -> tuple[list[int], list[bool]]:
        """Token ids and supervision; adds the tokens around a recording that the template has not written."""
        ids: list[int] = []
        marks: list[bool] = []
        for token, is_supervised in zip(tokens, supervised, strict=True):
            recording = self._tokenizer.recording
            if token.id != self._tokenizer.audio_id or ids[-1:] == list(recording[:1]):
                recording = (token.id,)
            ids += recording
            marks += [is_supervised] * len(recording)
        return ids, marks


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _unmarked(text: str) -> _Rendered:
    """The text without the marks of generation tags, and the spans between the marks."""
    pieces, supervised, at = [], [], 0
    for number, piece in enumerate(text.split(SUPERVISED)):
        inside, _, outside = piece.partition(SUPERVISED_END) if number else ("", "", piece)
        if inside:
            supervised.append((at, at + len(inside)))
        pieces += [inside, outside]
        at += len(inside) + len(outside)
    return _Rendered("".join(pieces), supervised)


def _span_of(whole: _Rendered, signed: _Rendered) -> Span | None:
    """The span in `whole` of the text that the sign replaces in `signed`; None if they differ elsewhere."""
    before, found, after = signed.text.partition(_SIGN)
    end = len(whole.text) - len(after)
    same = _SIGN not in after and whole.text.startswith(before) and whole.text.endswith(after)
    return (len(before), end) if found and same and end >= len(before) else None
