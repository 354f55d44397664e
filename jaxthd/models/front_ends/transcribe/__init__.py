"""A speech encoder beside a diarizer, whose speakers are added to its outputs, as in Nemotron 3.5 Transcribe
(2026)."""
