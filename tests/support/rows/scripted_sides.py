"""The two sides of a gate with scripted times and without processes."""

import math
import random
from collections import Counter


class Sides:
    """Visits of 1 ms, with noise of 0.1 %; ``slower(side, row, cost, generation)`` is what they take longer by."""

    def __init__(self, slower=lambda side, number, cost, generation: 0.0, lost=None, base=1.0):
        self.rng, self.slower, self.base = random.Random(1), slower, base
        self.lost = lost or {}  # what begin says of rows the first time
        self.generation, self.visits, self.costs, self.ended = 0, Counter(), Counter(), []
        self.begun = []  # how many rows at a time

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def start(self, questions):
        """They are there."""

    def introduce(self, question, say):
        say("BASE and NEW")

    def begin(self, questions):
        self.begun.append(len(questions))
        return {each.number: self.lost.pop(each.number) for each in questions if each.number in self.lost}

    def visit(self, side, question, costs):
        self.visits[question.number] += 1
        self.costs.update(costs)
        more = {cost: self.slower(side, question.number, cost, self.generation) for cost in costs}
        return {cost: self.base * (1 + more[cost]) * math.exp(self.rng.gauss(0, 0.001)) for cost in costs}

    def end(self, question):
        self.ended.append(question.number)

    def close(self):
        self.generation += 1
