#!/bin/sh
# A small harness, as an agent might bring one: it comes with the toolkit layer and works on the
# project in the workspace layer, with the Python and the git of the base layer.
set -eu
tools=$(dirname "$(readlink -f "$0")")
cd "${HARNESS_WORKSPACE:-/workspace}"
export PATH="$tools:$PATH" PYTHONPATH=src:.deps PYTHONDONTWRITEBYTECODE=1 LC_ALL=C.UTF-8
git() { command git -c safe.directory='*' -c user.name=harness -c user.email=harness@localhost "$@"; }
fail() { echo "harness: $*" >&2; exit 1; }

case "${1:-}" in
test)
    shift
    exec python3 -m pytest -q -p no:cacheprovider "$@"
    ;;
change)
    # Changed and new files in the project...
    file=$(rg --files-with-matches '^def make_str' src)
    cat >>"$file" <<'PYTHON'


def quickstart() -> str:
    """Say where this came from."""
    return "made in a sandbox"
PYTHON
    cat >tests/test_quickstart.py <<'PYTHON'
from click.utils import quickstart


def test_quickstart():
    assert quickstart() == "made in a sandbox"
PYTHON
    # ...a file deleted, a directory replaced, another renamed...
    rm README.md
    rm -r docs
    mkdir docs
    echo 'Written anew.' >docs/notes.txt
    mv requirements needed
    git add --all
    git commit --quiet --message 'A change made in a sandbox'
    # ...and the system below it: deleted, overwritten, linked, every odd mode and type.
    rm -r /usr/share/doc/git
    echo 'Changed in a sandbox.' >/etc/motd
    mkdir -m 1777 /srv/shared
    cp /bin/true /usr/local/bin/changed
    chmod 4755 /usr/local/bin/changed
    ln /usr/local/bin/changed /usr/local/bin/linked
    ln -s changed /usr/local/bin/pointer
    mkfifo -m 600 /srv/fifo
    truncate -s 4M /srv/sparse
    chown 1000:2000 /srv/sparse
    git log -1 --stat --format='%h %s' | tail -n 3
    ;;
check)
    [ "$(git log -1 --format=%s)" = 'A change made in a sandbox' ] || fail 'the commit is missing'
    [ -z "$(git status --porcelain)" ] || fail "git sees changes: $(git status --porcelain)"
    [ ! -e README.md ] || fail 'README.md came back'
    [ "$(ls docs)" = notes.txt ] || fail "docs holds $(ls docs)"
    [ ! -e requirements ] && [ -d needed ] || fail 'the renamed directory is wrong'
    [ ! -e /usr/share/doc/git ] || fail '/usr/share/doc/git came back'
    [ "$(cat /etc/motd)" = 'Changed in a sandbox.' ] || fail '/etc/motd is the old one'
    [ "$(stat -c %a:%h /usr/local/bin/linked)" = 4755:2 ] || fail 'mode or hard link is lost'
    [ "$(stat -c %u:%g:%s /srv/sparse)" = 1000:2000:4194304 ] || fail '/srv/sparse is wrong'
    python3 -m pytest -q -p no:cacheprovider tests/test_quickstart.py
    echo 'the change is there: commit, files, deletions, modes, links'
    ;;
tree)
    # Everything a tree compare sees, as text, of the whole root filesystem; contents of the
    # project. Link counts and sizes of directories are the filesystem's business.
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp \) -prune -o \
        -type d -printf 'd %m %U:%G %T@ %p\n' -o \
        -printf '%y %m %U:%G %T@ %n %s %l %p\n' | sort
    find . -xdev -type f -exec sha256sum {} + | sort -k 2
    ;;
*)
    fail "what is to be done: test, change, check or tree?"
    ;;
esac
