#!/bin/sh
# Entry point of a container: its arguments are those of hyperpodrun.
#
#   docker run IMAGE --nproc-per-node 8 train.py     hyperpodrun --nproc-per-node 8 train.py
#   docker run IMAGE bash                            a program by its name is run as it is, to look around
#
# exec keeps hyperpodrun process 1, which it is made to be: it reaps, and passes on the signals that stop a container.
case "${1-}" in
    "" | -* | *.py | */*) exec hyperpodrun "$@" ;;
esac
if command -v "$1" >/dev/null 2>&1; then
    exec "$@"
fi
exec hyperpodrun "$@"
