#!/bin/sh
# Unpacks a database server that is newer than Debian's into .servers/NAME, with all libraries that it needs. It
# installs no package, changes no other file of the machine and does not need root.
#
# Usage: fetch_server.sh mysql | postgresql | mariadb      (about 60 MB to fetch, 10 seconds)
#        fetch_server.sh libmysqlclient      (Oracle's client library and its header files, 40 MB)
#        fetch_server.sh python3.14      (an interpreter and its header files, 30 MB; needs patchelf in PATH)
#
# The programs in .servers/NAME/bin start the server by its own dynamic loader, because its C library is newer than
# that of the machine. If the server exists, the script does nothing. If the server cannot be fetched, it exits with 3
# and prints one line with the reason, which is also in .servers/NAME.error.
set -eu
umask 022

case ${1-} in
# MySQL is not in any stable release of Debian.
mysql) suite=sid packages='mysql-server-core mysql-client-core' programs='mysqld mysqlbinlog' ;;
postgresql) suite=sid packages=postgresql-18 programs='initdb postgres pg_basebackup' ;;
mariadb) suite=trixie packages='mariadb-server-core mariadb-client-core mariadb-client'
    programs='mariadbd my_print_defaults resolveip mariadb-binlog' scripts=mariadb-install-db ;;
libmysqlclient) suite=sid packages=libmysqlclient-dev programs= ;;
python3.14) suite=sid packages=python3.14-dev programs= ;;
*)
    echo 'Usage: fetch_server.sh mysql | postgresql | mariadb | libmysqlclient | python3.14' >&2
    exit 2
    ;;
esac
name=$1
servers=$(dirname "$0")/../.servers
mkdir -p "$servers"
target=$(cd "$servers" && pwd -P)/$name
[ ! -d "$target/bin" ] || exit 0

fail() {
    echo "$name cannot be fetched: $1" | tee "$target.error" >&2
    exit 3
}

archive=$(sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\{0,1\}\(http[^ ]*\).*/\2/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | grep debian | grep -v security |
    head -n 1)
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail 'this is not a Debian machine'
[ -n "$archive" ] || fail 'apt has no Debian archive among its sources'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/parts"
# This apt believes that nothing is installed, so it fetches the whole closure, the C library included.
: >"$work/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite main" >"$work/sources.list"
cat >"$work/apt.conf" <<END
Dir::State "$work";
Dir::State::lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work";
Dir::Cache::archives "$work/archives";
Dir::Etc::SourceList "$work/sources.list";
Dir::Etc::SourceParts "$work/parts";
Dir::Etc::PreferencesParts "$work/parts";
APT::Sandbox::User "$(id -un)";
APT::Install-Recommends "false";
Acquire::Languages "none";
Acquire::Retries "3";
Debug::NoLocking "true";
END
export APT_CONFIG="$work/apt.conf"
for step in update "-y --download-only install $packages"; do
    # shellcheck disable=SC2086 # words, not one
    apt-get -qq $step >"$work/log" 2>&1 || fail "$(grep '^E:' "$work/log" | head -n 1)"
done

root=$work/root
mkdir "$root"
for package in "$work"/archives/*.deb; do
    case ${package##*/} in
    # Only scripts that the tests do not run need these packages.
    perl* | libperl* | libgdbm* | libdb5* | postgresql-common* | systemd*) ;;
    *) dpkg-deb --extract "$package" "$root" ;;
    esac
done
loader=$(find "$root/usr/lib" "$root/lib" -name 'ld-linux-*' 2>/dev/null | head -n 1)
[ -n "$loader" ] || fail 'its packages have no dynamic loader'
loader=${loader#"$root"/}
mkdir "$root/bin.new"
for script in ${scripts-}; do
    ln -s "../usr/bin/$script" "$root/bin.new/$script"
done
for program in $programs; do
    file=$(find "$root/usr" -name "$program" -type f | head -n 1)
    [ -n "$file" ] || fail "its packages have no $program"
    directory=$(dirname "$file")
    program_path=${file#"$root"}
    # Beside the program, since PostgreSQL's programs look for each other in their own directory.
    mv "$file" "$file.real"
    cat >"$file" <<END
#!/bin/sh
file=\$(readlink -f "\$0")
root=\${file%$program_path}
exec "\$root/$loader" --argv0 "\$file" --library-path "\$root/$(dirname "$loader")" "\$file.real" "\$@"
END
    chmod 755 "$file"
    ln -s "..$program_path" "$root/bin.new/$program"
done
if [ "$name" = python3.14 ]; then
    # An interpreter must be a program, since it starts others of the same kind. It finds Debian's libraries first.
    libraries=$(dirname "$loader")
    patchelf --set-interpreter "$target/$loader" --force-rpath --set-rpath "$target/$libraries:/$libraries" \
        "$root/usr/bin/$name" 2>"$work/log" || fail "$(tail -n 1 "$work/log")"
    ln -s "../usr/bin/$name" "$root/bin.new/$name"
    # The compiler finds the headers of this architecture there.
    ln -s "../${libraries##*/}" "$root/usr/include/$name/"
fi
rm -rf "$root/bin"
mv "$root/bin.new" "$root/bin"
chmod -R a+rX "$root"
rm -rf "$target" "$target.error"
if [ "$(id -u)" -eq 0 ] && ! runuser -u nobody -- test -x "${target%/*}"; then
    # Root starts the server as another user. That user must be able to read it.
    readable=$(mktemp -d "${TMPDIR:-/tmp}/dlocks-$name-XXXXXX")
    chmod 755 "$readable"
    mv "$root" "$readable/$name"
    ln -s "$readable/$name" "$target"
else
    mv "$root" "$target"
fi
