# Shell functions that the scripts of this folder share; they source it.

export CI=true PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONUNBUFFERED=1
# Without bytecode, every process compiles the package again, and pytest rewrites every test's asserts.
unset PYTHONPATH VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
started=$SECONDS

step() { printf '\n\033[1m== %s\033[0m (%d s)\n' "$*" $((SECONDS - started)); }

pip_setting() { # the value of one of pip's settings, from its files or its environment variables
  python3 -m pip config list | sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" | head -n 1
}

# The packages of Colab's image, which are the lower bounds in pyproject.toml, without torch and ipywidgets: Kaggle's image
# has others. nbclient 0.11 needs a newer traitlets.
hosted_pins="ipython==7.34.0 ipykernel==6.17.1 jupyter_client==7.4.9 traitlets==5.7.1 nbclient<0.11 psutil==5.9.5"

find_python() { # print the path of an interpreter, on PATH or in pyenv's folder: `find_python 3.12`
  local found
  if command -v "python$1" >/dev/null && "python$1" --version >/dev/null 2>&1; then
    command -v "python$1"
    return
  fi
  found=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1."*/bin/python 2>/dev/null | sort -V | tail -n 1)
  [[ $found ]] && echo "$found"
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

requirements() { # print the requirements of the package, of pytest and of EXTRA, without torch: `requirements PYTHON - EXTRA...`
  "$@" <<'PYTHON'
import re, sys, tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = {"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", *sys.argv[1:]}
lines = [*project["dependencies"], *extras["notebook"], *extras["test"]]
names = [(re.split(r"[<>=\[; ]", line)[0], line) for line in lines]
required = {re.split(r"[<>=\[; ]", line)[0] for line in project["dependencies"]} - {"torch"}
print("\n".join(dict.fromkeys(line for name, line in names if name in required | wanted)))
PYTHON
}
