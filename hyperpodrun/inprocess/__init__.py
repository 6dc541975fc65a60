"""In-process restart: a fault costs a fraction of a second and no process.

    from hyperpodrun.inprocess.wrap import HPWrapper

    @HPWrapper
    def main(caller=None): ...

wrap.py has the theory. Nothing here imports torch before the wrapped script does.
"""
