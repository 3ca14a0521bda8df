//! Patterns over path bytes.
//!
//! `*` matches any bytes but `/`, `?` one byte but `/`, `**` as a whole component any number of
//! components, `[...]` one of a set (`[!...]` none of it), `\` takes the next byte as it is. A
//! pattern with a `/` other than at its end is matched against the whole path from the source's
//! root; one without against the name alone, at any depth. A `/` at the end matches directories
//! only. What is below a matched directory goes with it.

use crate::error::{PackError, Result};

/// A list of patterns.
#[derive(Debug, Clone, Default)]
pub(crate) struct Globs {
    patterns: Vec<Pattern>,
}

#[derive(Debug, Clone)]
struct Pattern {
    components: Vec<Component>,
    directories_only: bool,
    name_only: bool,
}

#[derive(Debug, Clone)]
enum Component {
    /// `**`
    Any,
    Tokens(Vec<Token>),
}

#[derive(Debug, Clone)]
enum Token {
    Byte(u8),
    One,
    Many,
    Set {
        negated: bool,
        ranges: Vec<(u8, u8)>,
    },
}

/// A pattern without wildcards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Literal {
    /// The path; without `anywhere` from the root.
    pub path: Vec<u8>,
    /// It may lie in any directory.
    pub anywhere: bool,
}

impl Globs {
    /// Parses all patterns of the option called `option`.
    pub(crate) fn new(option: &str, patterns: &[String]) -> Result<Self> {
        let patterns = patterns
            .iter()
            .map(|text| {
                parse(text.as_bytes()).map_err(|why| PackError::InvalidOption {
                    option: format!("{option} {text:?}"),
                    why: why.to_owned(),
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self { patterns })
    }

    /// True if there is nothing to match.
    pub(crate) fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Whether the path, or a directory on the way to it, is matched. `names` are its components.
    pub(crate) fn matches_any_prefix(&self, names: &[&[u8]], directory: bool) -> bool {
        (1..=names.len()).any(|end| {
            let prefix = names.get(..end).unwrap_or_default();
            self.matches(prefix, directory || end < names.len())
        })
    }

    /// The patterns without wildcards. One that ends with a component of wildcards alone, as in
    /// `/etc/secret/*`, stands for the directory.
    pub(crate) fn literals(&self) -> impl Iterator<Item = Literal> {
        self.patterns.iter().filter_map(|pattern| {
            let mut parts = pattern.components.as_slice();
            let mut anywhere = pattern.name_only;
            if let Some((Component::Any, rest)) = parts.split_first() {
                (parts, anywhere) = (rest, true);
            }
            if let Some((last, rest)) = parts.split_last()
                && last.is_all()
            {
                parts = rest;
            }
            let names: Option<Vec<Vec<u8>>> = parts.iter().map(Component::literal).collect();
            let path = names.filter(|names| !names.is_empty())?.join(&b'/');
            Some(Literal { path, anywhere })
        })
    }

    /// Whether the names in a directory are matched by a pattern that ends with a component of
    /// wildcards alone.
    pub(crate) fn matches_in(&self, names: &[&[u8]]) -> bool {
        self.patterns.iter().any(|pattern| {
            let parts = pattern.components.split_last();
            parts.is_some_and(|(last, rest)| {
                last.is_all() && !rest.is_empty() && path_matches(rest, names)
            })
        })
    }

    /// Whether the path itself is matched.
    pub(crate) fn matches(&self, names: &[&[u8]], directory: bool) -> bool {
        let last = names.len().saturating_sub(1);
        self.patterns.iter().any(|pattern| {
            if pattern.directories_only && !directory {
                return false;
            }
            let names = if pattern.name_only {
                names.get(last..).unwrap_or_default()
            } else {
                names
            };
            path_matches(&pattern.components, names)
        })
    }
}

fn parse(text: &[u8]) -> Result<Pattern, &'static str> {
    let (text, directories_only) = match text.strip_suffix(b"/") {
        Some(rest) => (rest, true),
        None => (text, false),
    };
    let name_only = !text.contains(&b'/');
    let text = text.strip_prefix(b"/").unwrap_or(text);
    if text.is_empty() {
        return Err("the pattern is empty");
    }
    let components = text
        .split(|&byte| byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".");
    let components = components
        .map(|part| {
            if part == b"**" {
                Ok(Component::Any)
            } else {
                tokens(part).map(Component::Tokens)
            }
        })
        .collect::<Result<_, _>>()?;
    Ok(Pattern {
        components,
        directories_only,
        name_only,
    })
}

fn tokens(text: &[u8]) -> Result<Vec<Token>, &'static str> {
    let mut found = Vec::new();
    let mut bytes = text.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        found.push(match byte {
            b'*' => Token::Many,
            b'?' => Token::One,
            b'\\' => Token::Byte(bytes.next().ok_or("a backslash ends the pattern")?),
            b'[' => {
                let negated = bytes
                    .next_if(|&next| next == b'!' || next == b'^')
                    .is_some();
                let mut ranges: Vec<(u8, u8)> = Vec::new();
                loop {
                    let from = bytes.next().ok_or("a set is not closed with ]")?;
                    if from == b']' && !ranges.is_empty() {
                        break;
                    }
                    let mut to = from;
                    if bytes.peek() == Some(&b'-') {
                        bytes.next();
                        match bytes.next().ok_or("a set is not closed with ]")? {
                            // A dash before the end stands for itself.
                            b']' => {
                                ranges.extend([(from, from), (b'-', b'-')]);
                                break;
                            }
                            end => to = end,
                        }
                    }
                    ranges.push((from, to));
                }
                Token::Set { negated, ranges }
            }
            byte => Token::Byte(byte),
        });
    }
    Ok(found)
}

/// Both levels of matching are the usual one with a single point to fall back to, which takes at
/// most pattern times text steps.
fn path_matches(pattern: &[Component], names: &[&[u8]]) -> bool {
    wildcard(
        pattern,
        names,
        |component| matches!(component, Component::Any),
        |component, name| match component {
            Component::Any => false,
            Component::Tokens(tokens) => wildcard(
                tokens,
                name,
                |token| matches!(token, Token::Many),
                |token, byte| token.is(*byte),
            ),
        },
    )
}

impl Component {
    /// Whether it matches any name.
    fn is_all(&self) -> bool {
        match self {
            Self::Any => true,
            Self::Tokens(tokens) => matches!(tokens.as_slice(), [Token::Many]),
        }
    }

    /// The only name that it matches.
    fn literal(&self) -> Option<Vec<u8>> {
        match self {
            Self::Any => None,
            Self::Tokens(tokens) => tokens
                .iter()
                .map(|token| match token {
                    Token::Byte(byte) => Some(*byte),
                    Token::One | Token::Many | Token::Set { .. } => None,
                })
                .collect(),
        }
    }
}

impl Token {
    fn is(&self, byte: u8) -> bool {
        match self {
            Self::Byte(own) => *own == byte,
            Self::One => true,
            Self::Many => false,
            Self::Set { negated, ranges } => {
                ranges.iter().any(|&(from, to)| (from..=to).contains(&byte)) != *negated
            }
        }
    }
}

fn wildcard<P, T>(
    pattern: &[P],
    text: &[T],
    is_many: impl Fn(&P) -> bool,
    matches: impl Fn(&P, &T) -> bool,
) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut fallback: Option<(usize, usize)> = None;
    loop {
        match (pattern.get(p), text.get(t)) {
            (Some(part), _) if is_many(part) => {
                fallback = Some((p, t));
                p += 1;
            }
            (Some(part), Some(item)) if matches(part, item) => {
                p += 1;
                t += 1;
            }
            (None, None) => return true,
            _ => match fallback {
                // The last run takes one item more.
                Some((at, taken)) if taken < text.len() => {
                    fallback = Some((at, taken + 1));
                    p = at + 1;
                    t = taken + 1;
                }
                _ => return false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hit(pattern: &str, path: &str) -> bool {
        let directory = path.ends_with('/');
        let names = crate::path::components(path.as_bytes());
        Globs::new("exclude", &[pattern.to_owned()])
            .unwrap()
            .matches_any_prefix(&names, directory)
    }

    #[test]
    fn patterns() {
        for (pattern, path) in [
            ("*.pyc", "a/b/c.pyc"),
            ("a/*.c", "a/x.c"),
            ("/a", "a"),
            ("a/**/z", "a/z"),
            ("a/**/z", "a/b/c/z"),
            ("**/z", "z"),
            ("cache", "x/cache/y/z"),
            ("cache/", "x/cache/"),
            ("cache/", "x/cache/y"),
            ("a/", "a/b"),
            ("[a-c]?[!x]", "d/bzy"),
            ("\\*", "*"),
            ("[]x-]", "-"),
            ("a*b*c", "aXbXbXc"),
            ("/x/y", "x/y/z"),
        ] {
            assert!(hit(pattern, path), "{pattern} {path}");
        }
        for (pattern, path) in [
            ("*.pyc", "a/b/c.py"),
            ("a/*.c", "b/a/x.c"),
            ("a/*.c", "a/b/x.c"),
            ("/a", "b/a"),
            ("cache/", "x/cache"),
            ("[!a]", "a"),
            ("?", "ab"),
            ("\\*", "x"),
        ] {
            assert!(!hit(pattern, path), "{pattern} {path}");
        }
        for bad in ["", "/", "[a", "a\\", "[a-"] {
            assert!(Globs::new("exclude", &[bad.to_owned()]).is_err(), "{bad}");
        }
    }

    #[test]
    fn many_stars_do_not_explode() {
        let pattern = "*a".repeat(50) + "b";
        assert!(!hit(&pattern, &"a".repeat(5000)));
    }
}
