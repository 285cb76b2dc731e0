class MLIRCompilationError(Exception):
    """As in triton-ascend it is no RuntimeError, and its message has several lines."""

    def __init__(self, stage, message):
        rule = "///------------------[ERROR][Triton][{}]------------------\n"
        begin, end = rule.format("BEG"), rule.format("END")
        super().__init__(f"\n{begin}[{stage}] encounters error:\n{message}\n{end}")
