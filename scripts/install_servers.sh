#!/bin/sh
# Installs the Debian packages that the tests and the benchmarks need. It starts, stops and configures nothing.
#
# Usage: install_servers.sh [servers | backends | venv | make]
#
#   servers  PostgreSQL, MariaDB, PgBouncer, libfaketime, Chromium, ip, and the build tools for mysqlclient, for
#            "make test" (default)
#   backends Redis and ZooKeeper without their services, and the Galera library of MariaDB, for "make test-backends"
#            and "make bench"
#   venv     the package that creates virtual environments for $PYTHON
#   make     make itself
#
# If everything is installed, it does nothing. Otherwise it needs root, or sudo without a password. Without these, it
# prints the command to run. PYTHON names the interpreter (python3).
set -eu

WHAT=${1:-servers}
PYTHON=${PYTHON:-python3}
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH

POLICY=/usr/sbin/policy-rc.d
SAVED_POLICY=$POLICY.set-aside-by-dlocks
MARK='# Written by install_servers.sh of dlocks, for the time of one installation.'
NO_CLUSTER_DIRECTORY=/etc/postgresql-common/createcluster.d
NO_CLUSTER=$NO_CLUSTER_DIRECTORY/zz-dlocks.conf

# Set if restore() has to remove the directory.
MADE_DIRECTORY=

say() {
    printf '%s\n' "$*" >&2
}

have() {
    command -v "$1" >/dev/null 2>&1
}

# Return whether the arguments, an expanded glob, name a file.
exists() {
    [ -e "$1" ]
}

# Print the package of Chromium. Debian also has one without windows, which is smaller and faster.
chromium_package() {
    if grep -qs '^ID=debian' /etc/os-release; then echo chromium-headless-shell; else echo chromium; fi
}

# Print the name of Debian's package of this interpreter, as in python3.11, or nothing if it is not Debian's.
debian_python() {
    "$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2] if sys.base_prefix == "/usr" else "")'
}

missing_packages() {
    case $WHAT in
    make)
        have make || echo make
        ;;
    venv)
        if ! "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            python=$(debian_python)
            echo "${python:-python3}-venv"
        fi
        ;;
    servers)
        if ! { have initdb && have postgres; } && ! exists /usr/lib/postgresql/*/bin/initdb; then
            echo postgresql
        fi
        # Only the server. The package mariadb-server would also install a service.
        { have mariadbd && have mariadb-install-db; } || echo mariadb-server-core
        have my_print_defaults || echo mariadb-client-core
        # mariadb-binlog
        have mariadb-binlog || have mysqlbinlog || echo mariadb-client
        exists /usr/lib/*/faketime/libfaketime.so.1 || echo libfaketime
        have pgbouncer || echo pgbouncer
        # The tests create networks that they can cut.
        have ip || echo iproute2
        have chromium-headless-shell || have chromium || have chromium-browser || have google-chrome ||
            chromium_package
        # If mysqlclient is already built, no compiler is needed.
        if ! "$PYTHON" -c 'import MySQLdb' >/dev/null 2>&1; then
            have pkg-config || echo pkg-config
            have cc || have gcc || echo gcc libc6-dev
            if ! have pkg-config || ! { pkg-config --exists mysqlclient || pkg-config --exists mariadb ||
                pkg-config --exists libmariadb; }; then
                echo libmariadb-dev
            fi
            if ! "$PYTHON" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then
                python=$(debian_python)
                [ -z "$python" ] || echo "$python-dev"
            fi
        fi
        ;;
    backends)
        # The binary is a symbolic link to a tool of this package. The package redis-server would add a service.
        have redis-server || have redis-check-rdb || echo redis-tools
        # The library contains the server. The package zookeeper would add the desktop parts of Java.
        exists /usr/share/java/zookeeper.jar || echo libzookeeper-java
        have java || echo default-jre-headless
        exists /usr/lib/galera/libgalera_smm.so || echo galera-4
        ;;
    esac
}

# Keep services from starting, unless a policy of the machine does so already.
forbid_services() {
    if [ -e "$SAVED_POLICY" ] || grep -qsF "$MARK" "$POLICY"; then
        # An earlier run was killed before it could tidy up.
        restore
    fi
    if [ -e "$POLICY" ]; then
        status=0
        "$POLICY" mariadb start >/dev/null 2>&1 || status=$?
        [ "$status" -ne 101 ] || return 0
        mv "$POLICY" "$SAVED_POLICY"
    fi
    printf '#!/bin/sh\n%s\nexit 101\n' "$MARK" >"$POLICY"
    chmod 755 "$POLICY"
}

# By default, PostgreSQL's packages create a cluster for the machine.
forbid_cluster() {
    if [ ! -d "$NO_CLUSTER_DIRECTORY" ]; then
        mkdir -p "$NO_CLUSTER_DIRECTORY"
        MADE_DIRECTORY=yes
    fi
    printf '%s\ncreate_main_cluster = false\n' "$MARK" >"$NO_CLUSTER"
}

restore() {
    if grep -qsF "$MARK" "$POLICY"; then
        rm -f "$POLICY"
    fi
    if [ -e "$SAVED_POLICY" ]; then
        mv "$SAVED_POLICY" "$POLICY"
    fi
    rm -f "$NO_CLUSTER"
    if [ -n "$MADE_DIRECTORY" ]; then
        rmdir "$NO_CLUSTER_DIRECTORY" 2>/dev/null || true
    fi
}

apt_get() {
    # needrestart would restart services of the machine on Ubuntu.
    DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get -q -y -o DPkg::Lock::Timeout=300 \
        -o Dpkg::Use-Pty=0 -o APT::Get::Remove=false "$@" </dev/null
}

case $WHAT in
servers | backends | venv | make) ;;
*)
    say "install_servers.sh: unknown argument '$WHAT'. Use servers, backends, venv or make."
    exit 2
    ;;
esac
if [ "$WHAT" != make ] && ! have "$PYTHON"; then
    say "$PYTHON was not found. Please install Python 3.11 or newer."
    exit 1
fi

MISSING=$(missing_packages | tr '\n' ' ')
[ -n "$MISSING" ] || exit 0

if ! have apt-get; then
    say "Missing: $MISSING(names of Debian packages). There is no apt-get here. Please install them in another way."
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    # Pass the full path, because root's PATH may find another interpreter.
    whole=$(command -v "$PYTHON" || echo "$PYTHON")
    if have sudo && sudo -n true 2>/dev/null; then
        exec sudo -n env "PYTHON=$whole" sh "$0" "$WHAT"
    fi
    say "Missing: $MISSING"
    say "Please run this command, which starts no service and creates no cluster. Then try again:"
    say "    sudo env PYTHON=$whole sh $0 $WHAT"
    exit 1
fi

say "Installing: $MISSING"
trap restore EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
forbid_services
[ "$WHAT" != servers ] || forbid_cluster

log=$(mktemp)
apt_get update >"$log" 2>&1 || say "apt-get update failed; trying with the existing package lists."
# shellcheck disable=SC2086 # words, not one
if ! apt_get install --no-install-recommends $MISSING >>"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    say "apt-get could not install: $MISSING"
    exit 1
fi
rm -f "$log"

MISSING=$(missing_packages | tr '\n' ' ')
if [ -n "$MISSING" ]; then
    say "Installed, but still not found: $MISSING"
    exit 1
fi
