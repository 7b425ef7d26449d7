class Replay:
    def __init__(self, config): pass
