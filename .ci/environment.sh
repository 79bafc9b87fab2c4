# Shell functions that the scripts of this folder share; they source it.

export CI=true PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONUNBUFFERED=1
unset PYTHONPATH VIRTUAL_ENV
started=$SECONDS

step() { printf '\n\033[1m== %s\033[0m (%d s)\n' "$*" $((SECONDS - started)); }

pip_setting() { # the value of one of pip's settings, from its files or its environment variables
  python3 -m pip config list | sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" | head -n 1
}

# install PYTHON ARGUMENT...: as `pip install ARGUMENT...` in the environment of PYTHON, by uv, which takes a fraction of
# pip's time. uv does not read pip's settings, so the two that decide where packages come from are passed on; what uv
# cannot install, pip does. After `uv_options=--compile-bytecode` it compiles all bytecode at once, as pip does: where
# processes write none, each of them would compile torch again.
install() {
  local python=$1
  shift
  if [[ -z ${uv:-} ]]; then
    uv=none
    if python3 -m venv "$scratch/uv" && "$scratch/uv/bin/pip" install -q uv; then uv=$scratch/uv/bin/uv; fi
    export UV_FIND_LINKS=${UV_FIND_LINKS:-$(pip_setting find-links)}
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$(pip_setting index-url)}
    [[ $UV_DEFAULT_INDEX ]] || unset UV_DEFAULT_INDEX
    export UV_CACHE_DIR="$scratch/uv-cache" UV_LINK_MODE=hardlink UV_NO_PROGRESS=1
  fi
  if [[ $uv == none ]] || ! "$uv" pip install -q ${uv_options:-} --python "$python" "$@"; then
    "$python" -m pip install -q "$@"
  fi
}
