//! Commands that take a guest in at a destination, with what is told of that guest.

/// `word` with the name and the memory of a virtual machine in it. What stands in braces and is no
/// word is left as it is, and so is `${WORD}`, which is a shell's.
///
/// # Errors
/// The first placeholder that there is not.
///
/// ```
/// let word = godwit_evacuate::filled("libvirt:{name}", "web01", "4GiB");
/// assert_eq!(word.as_deref(), Ok("libvirt:web01"));
/// ```
pub fn filled(word: &str, name: &str, memory: &str) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = word;
    while let Some(at) = rest.find('{') {
        let (before, braced) = rest.split_at(at);
        text.push_str(before);
        let end = braced.find('}').filter(|end| is_word(&braced[1..*end]));
        match end {
            Some(end) if !before.ends_with('$') => {
                text.push_str(match &braced[1..end] {
                    "name" => name,
                    "memory" => memory,
                    other => {
                        return Err(format!(
                            "nobody knows {{{other}}}: there are {{name}} and {{memory}}, the name \
                             of a VM and its memory"
                        ));
                    }
                });
                rest = &braced[end + 1..];
            }
            _ => {
                text.push('{');
                rest = &braced[1..];
            }
        }
    }
    Ok(text + rest)
}

fn is_word(text: &str) -> bool {
    let in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    !text.is_empty() && text.chars().all(in_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_gets_the_name_and_the_memory_and_keeps_its_own_braces() {
        let of = |word: &str| filled(word, "web01", "4GiB").unwrap();
        assert_eq!(of("libvirt:{name}"), "libvirt:web01");
        assert_eq!(of("{name}{memory}{name}"), "web014GiBweb01");
        for own in ["", "a}", "{", "{}", "{ print $1 }", "${name}", "{a b}", "é{é}"] {
            assert_eq!(of(own), own);
        }
        assert_eq!(of("{{name}}"), "{web01}");
    }

    #[test]
    fn a_placeholder_that_nobody_knows_is_told() {
        let why = filled("x{vm-name}y", "web01", "4GiB").unwrap_err();
        assert!(why.starts_with("nobody knows {vm-name}: there are {name} and {memory}"), "{why}");
    }
}
