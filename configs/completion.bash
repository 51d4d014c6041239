# Completes keys and groups of `python -m shardtrain.train`, under torchrun too. Hydra's own script knows no `-m`.
_shardtrain() {
  local line=${COMP_LINE:0:COMP_POINT} python=$1 words word
  [[ $line == *"-m shardtrain.train "* ]] || return
  [[ $python == *python* ]] || python=python
  word=${line##* } line=${line#*-m shardtrain.train }
  line=${line%"$word"}
  line=${line//+recipe=/recipe=}$word  # a recipe that is given already as the defaults list has it
  words=$(COMP_LINE="shardtrain $line" "$python" -m shardtrain.train -sc query=bash 2>/dev/null)
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
  if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then  # bash replaces what comes after the = alone
    COMPREPLY=("${COMPREPLY[@]#*=}")
  fi
}
complete -o default -F _shardtrain python python3 torchrun
