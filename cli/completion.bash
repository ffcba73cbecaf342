# Bash completion of mobula: `source` it, or install it as share/bash-completion/completions/mobula.
# The program itself knows its verbs and options, so nothing can get out of step here.
_mobula() {
    local IFS=$'\n'
    COMPREPLY=($("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o bashdefault -o default -F _mobula mobula mobula-client
