# SPDX-License-Identifier: Apache-2.0
"""Whether answers are still right: `python -m kvferry.judge`, for any engine.

texts     text that questions are hidden in: of the user, or made
tasks     documents, questions and right answers in the forms of RULER, free ones, and other kinds of work
figures   scores, intervals, divergences
record    what was asked and said: a file of lines, from which a run goes on
servers, programs, models   who is asked: OpenAI's interface, the kvferry command, Transformers
report    rows, verdict, JSON, picture

Modules know those above them. `texts`, `tasks` and `figures` need nothing but Python.
"""
