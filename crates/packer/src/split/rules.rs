//! The file that says which part of a tree goes where. SEMANTICS.md, "Splitting", describes it.

use layerpack_store::{Kind, LayerName, Reference, Version};
use serde::Deserialize;

use crate::error::{PackError, Result};
use crate::glob::Globs;
use crate::path::{components, escapes};

/// Longest file in bytes.
const MAX_TEXT: usize = 1 << 20;
/// Most parts.
const MAX_PARTS: usize = 64;
/// Most rules of all parts together.
const MAX_RULES: usize = 10_000;

/// How one tree is split into several layers.
#[derive(Debug, Clone)]
pub struct Split {
    /// The base first, the others in the order in which they are to be stacked.
    pub(super) parts: Vec<Part>,
    pub(super) leftover: Leftover,
    pub(super) hard_links: HardLinks,
}

/// One of the layers.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub reference: Reference,
    /// Paths that are its own with all below them, as components.
    at: Vec<Vec<Vec<u8>>>,
    globs: Globs,
    except: Globs,
}

/// Where goes what no rule names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leftover {
    /// To a part, by its index.
    Part(usize),
    /// Nowhere.
    Drop,
    /// It is an error.
    Refuse,
}

/// What happens to a file that has names in several parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum HardLinks {
    /// All its names go to the lowest of them.
    #[default]
    Together,
    /// Each part has a file of its own.
    Copy,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    leftover: Option<String>,
    #[serde(default)]
    hard_links: HardLinks,
    part: Vec<FilePart>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FilePart {
    kind: String,
    name: Option<String>,
    version: Option<String>,
    #[serde(default)]
    at: Vec<String>,
    #[serde(default)]
    globs: Vec<String>,
    #[serde(default)]
    except: Vec<String>,
}

impl Split {
    /// Reads the file's text. `name` and `version` are for parts that have none of their own.
    ///
    /// # Errors
    /// [`PackError::InvalidOption`], saying what is wrong and where.
    pub fn parse(text: &str, name: Option<&str>, version: Option<&str>) -> Result<Self> {
        if text.len() > MAX_TEXT {
            return Err(invalid(format!("it is longer than {MAX_TEXT} bytes")));
        }
        let file: File = toml::from_str(text).map_err(|error| {
            // Its own text has several lines and shows the place with a picture.
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map_or(1, |before| before.matches('\n').count() + 1);
            invalid(format!("line {line}: {}", one_line(error.message())))
        })?;
        let rules = |part: &FilePart| part.at.len() + part.globs.len() + part.except.len();
        if file.part.len() > MAX_PARTS || file.part.iter().map(rules).sum::<usize>() > MAX_RULES {
            return Err(invalid(format!(
                "more than {MAX_PARTS} parts or {MAX_RULES} rules"
            )));
        }
        let mut parts: Vec<Part> = Vec::with_capacity(file.part.len());
        for (index, part) in file.part.iter().enumerate() {
            let made = Part::new(part, name, version)
                .map_err(|why| invalid(format!("part {}: {why}", index + 1)))?;
            let (base, first) = (made.reference.kind == Kind::Base, index == 0);
            if base != first {
                return Err(invalid(
                    "one part is the base, and it comes first".to_owned(),
                ));
            }
            let same = |other: &Part| other.reference == made.reference;
            if parts.iter().any(same) {
                return Err(invalid(format!("two parts are called {}", made.reference)));
            }
            parts.push(made);
        }
        if parts.is_empty() {
            return Err(invalid(
                "it has no part; write at least one [[part]] of kind \"base\"".to_owned(),
            ));
        }
        let leftover = match file.leftover.as_deref() {
            None | Some("base") => Leftover::Part(0),
            Some("drop") => Leftover::Drop,
            Some("error") => Leftover::Refuse,
            Some(named) => {
                let found = parts.iter().position(|part| {
                    let kind = part.reference.kind;
                    named == format!("{kind}/{}", part.reference.name)
                });
                Leftover::Part(found.ok_or_else(|| {
                    invalid(format!(
                        "leftover = {named:?} is neither \"base\", \"drop\", \"error\" nor the KIND/NAME of a part"
                    ))
                })?)
            }
        };
        Ok(Self {
            parts,
            leftover,
            hard_links: file.hard_links,
        })
    }

    /// Makes leftovers an error, whatever the file says.
    #[must_use]
    pub fn strict(mut self) -> Self {
        self.leftover = Leftover::Refuse;
        self
    }

    /// Whether what was not meant is an error.
    pub(super) fn is_strict(&self) -> bool {
        matches!(self.leftover, Leftover::Refuse)
    }

    /// What the parts are published as, the base first.
    pub fn references(&self) -> impl Iterator<Item = &Reference> {
        self.parts.iter().map(|part| &part.reference)
    }

    /// The part that a path is given to, the last one whose rules match.
    pub(super) fn part_of(&self, names: &[&[u8]], directory: bool) -> Option<usize> {
        self.parts
            .iter()
            .rposition(|part| part.matches(names, directory))
    }
}

impl Part {
    fn new(part: &FilePart, name: Option<&str>, version: Option<&str>) -> Result<Self, String> {
        let kind = match part.kind.as_str() {
            "base" => Kind::Base,
            "workspace" => Kind::Workspace,
            "toolkit" => Kind::Toolkit,
            other => {
                return Err(format!(
                    "kind {other:?} is none of \"base\", \"workspace\", \"toolkit\""
                ));
            }
        };
        let of = |own: &Option<String>, given: Option<&str>, what: &str| {
            own.as_deref()
                .or(given)
                .map(str::to_owned)
                .ok_or_else(|| format!("it has no {what}; write one, or give it with --{what}"))
        };
        let name = LayerName::new(&of(&part.name, name, "name")?).map_err(|e| e.to_string())?;
        let version =
            Version::new(&of(&part.version, version, "version")?).map_err(|e| e.to_string())?;
        let globs = |key: &str, list: &[String]| Globs::new(key, list).map_err(|e| e.to_string());
        let mut at = Vec::with_capacity(part.at.len());
        for path in &part.at {
            if escapes(path.as_bytes()) || path.contains('\0') {
                return Err(format!("at = {path:?} is no path below the root"));
            }
            let names = components(path.as_bytes());
            at.push(names.into_iter().map(<[u8]>::to_vec).collect());
        }
        Ok(Self {
            reference: Reference::new(kind, name, version),
            at,
            globs: globs("globs", &part.globs)?,
            except: globs("except", &part.except)?,
        })
    }

    fn matches(&self, names: &[&[u8]], directory: bool) -> bool {
        let below = |prefix: &Vec<Vec<u8>>| {
            names.len() >= prefix.len() && prefix.iter().zip(names).all(|(a, b)| a == b)
        };
        (self.at.iter().any(below) || self.globs.matches_any_prefix(names, directory))
            && !self.except.matches_any_prefix(names, directory)
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn invalid(why: String) -> PackError {
    PackError::InvalidOption {
        option: "split file".to_owned(),
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"
        [[part]]
        kind = "base"
        name = "debian"
        version = "12"
        at = ["/"]
        except = ["*.log"]

        [[part]]
        kind = "workspace"
        name = "repo"
        at = ["/workspace"]

        [[part]]
        kind = "toolkit"
        name = "go"
        version = "1"
        globs = ["usr/local/go*/**", "**/*.go"]
    "#;

    fn part(split: &Split, path: &str) -> Option<usize> {
        split.part_of(&components(path.as_bytes()), path.ends_with('/'))
    }

    #[test]
    fn the_last_part_that_matches_has_a_path() {
        let split = Split::parse(EXAMPLE, None, Some("7")).unwrap();
        let names: Vec<String> = split.references().map(ToString::to_string).collect();
        assert_eq!(
            names,
            ["base/debian:12", "workspace/repo:7", "toolkit/go:1"]
        );
        for (path, expected) in [
            ("etc/passwd", Some(0)),
            ("workspace/", Some(1)),
            ("workspace/a/b", Some(1)),
            ("workspaces", Some(0)),
            ("workspace/a/x.go", Some(2)),
            ("usr/local/go1.2/bin/go", Some(2)),
            ("usr/local/", Some(0)),
            ("var/x.log", None),
            ("workspace/x.log", Some(1)),
        ] {
            assert_eq!(part(&split, path), expected, "{path}");
        }
        assert_eq!(split.leftover, Leftover::Part(0));
        assert_eq!(split.strict().leftover, Leftover::Refuse);
    }

    #[test]
    fn files_that_make_no_sense_are_refused_with_a_reason() {
        let base = "[[part]]\nkind='base'\nname='a'\nversion='1'\n";
        for (text, part) in [
            ("", "part"),
            ("part = []", "no part"),
            ("\n\nx = [", "line 3"),
            ("[[part]]\nkind='diff'\nname='a'\nversion='1'", "diff"),
            (
                "[[part]]\nkind='toolkit'\nname='a'\nversion='1'",
                "comes first",
            ),
            (&format!("{base}{base}"), "comes first"),
            ("[[part]]\nkind='base'\nname='A B'\nversion='1'", "part 1"),
            ("[[part]]\nkind='base'\nname='a'", "--version"),
            (&format!("{base}at=['../x']"), "../x"),
            (&format!("{base}globs=['[a']"), "globs"),
            (&format!("{base}paths=['a']"), "paths"),
            (&format!("leftover='toolkit/x'\n{base}"), "toolkit/x"),
            (
                &format!(
                    "{base}[[part]]\nkind='toolkit'\nname='a'\nversion='1'\n[[part]]\nkind='toolkit'\nname='a'\nversion='1'"
                ),
                "two parts",
            ),
        ] {
            let error = Split::parse(text, None, None).unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
