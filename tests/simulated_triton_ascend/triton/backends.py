backends = {"ascend": None}
