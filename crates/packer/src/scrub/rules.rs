//! The file that says what must not leave a sandbox. SEMANTICS.md, "Scrubbing", describes it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use layerpack_store::Digest;
use serde::Deserialize;

use super::secrets;
use super::sets::SETS;
use crate::error::{PackError, Result};
use crate::glob::{Globs, Literal};
use crate::path::components;

/// Longest file in bytes.
const MAX_TEXT: usize = 1 << 20;
/// Most rules, and most patterns of all together.
const MAX_RULES: usize = 1000;
const MAX_PATTERNS: usize = 10_000;
/// Contents are looked at in files up to this size in bytes unless the rules say otherwise.
const MAX_CONTENT: u64 = 8 << 20;

/// What happens to what a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Action {
    /// It is left out.
    #[default]
    Scrub,
    /// It makes the pack fail.
    Forbid,
    /// It is packed, and the report names it.
    Suspicious,
    /// It is packed whatever later rules say.
    Keep,
}

/// A type of entry that a rule can ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Type {
    File,
    Directory,
    Symlink,
    Socket,
    Fifo,
    Device,
}

/// What a rule looks at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    pub path: &'a [u8],
    pub kind: Type,
    /// Of a file, in bytes.
    pub size: u64,
    pub uid: u32,
    pub gid: u32,
    /// Modification time in seconds since 1970.
    pub mtime: i64,
}

/// One rule.
#[derive(Debug, Clone)]
pub(super) struct Rule {
    /// Its name in reports.
    pub name: String,
    pub action: Action,
    globs: Globs,
    except: Globs,
    types: Vec<Type>,
    sizes: (Option<u64>, Option<u64>),
    /// Modified before, at or after, in seconds since 1970.
    times: (Option<i64>, Option<i64>),
    owners: Vec<(u32, u32)>,
    groups: Vec<(u32, u32)>,
    /// Names of patterns over contents.
    pub content: Vec<String>,
    /// Pieces of text that contents may hold.
    pub text: Vec<String>,
    /// Whether what it names is looked for in layers below though the sandbox did not touch it.
    searched: bool,
}

/// Which git repositories lose references that are newer than a commit.
#[derive(Debug, Clone)]
pub(super) struct GitRule {
    /// Its name in reports.
    pub name: String,
    at: Globs,
    /// The commit, as hexadecimal text.
    pub newer_than: String,
}

/// What must not leave a sandbox.
#[derive(Debug, Clone)]
pub struct Rules {
    pub(super) rules: Vec<Rule>,
    pub(super) git: Vec<GitRule>,
    pub(super) max_content: u64,
    digest: Digest,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    sets: Vec<String>,
    max_content: Option<String>,
    #[serde(default)]
    rule: Vec<FileRule>,
    #[serde(default)]
    git: Vec<FileGit>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileRule {
    name: Option<String>,
    #[serde(default)]
    action: Action,
    #[serde(default)]
    globs: Vec<String>,
    #[serde(default)]
    except: Vec<String>,
    #[serde(default)]
    types: Vec<Type>,
    larger_than: Option<String>,
    smaller_than: Option<String>,
    older_than: Option<String>,
    newer_than: Option<String>,
    #[serde(default)]
    owners: Vec<Ids>,
    #[serde(default)]
    groups: Vec<Ids>,
    #[serde(default)]
    content: Vec<String>,
    #[serde(default)]
    text: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileGit {
    name: Option<String>,
    #[serde(default)]
    at: Vec<String>,
    newer_than: String,
}

/// An id, or a range as `1000-1999`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Range(String),
}

impl Rules {
    /// Reads a rules file's text. Ages count from `now`.
    ///
    /// # Errors
    /// [`PackError::InvalidOption`], saying what is wrong and where.
    pub fn parse(text: &str, now: SystemTime) -> Result<Self> {
        if text.len() > MAX_TEXT {
            return Err(invalid(format!("it is longer than {MAX_TEXT} bytes")));
        }
        let file: File = toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map_or(1, |before| before.matches('\n').count() + 1);
            let said = error.message().replace('\n', " ");
            invalid(format!("line {line}: {said}"))
        })?;
        let patterns: usize = file
            .rule
            .iter()
            .map(|rule| rule.globs.len() + rule.except.len() + rule.text.len())
            .sum();
        if file.rule.len() + file.git.len() > MAX_RULES || patterns > MAX_PATTERNS {
            return Err(invalid(format!(
                "more than {MAX_RULES} rules or {MAX_PATTERNS} patterns"
            )));
        }
        let now = now
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX));
        let mut rules = Vec::new();
        for (index, rule) in file.rule.iter().enumerate() {
            let made = Rule::new(rule, index, now)
                .map_err(|why| invalid(format!("rule {}: {why}", index + 1)))?;
            rules.push(made);
        }
        rules.extend(sets(&file.sets)?);
        let mut git = Vec::new();
        for (index, rule) in file.git.iter().enumerate() {
            let number = index + 1;
            git.push(
                GitRule::new(rule, number)
                    .map_err(|why| invalid(format!("git rule {number}: {why}")))?,
            );
        }
        let max_content = match &file.max_content {
            None => MAX_CONTENT,
            Some(size) => bytes(size).map_err(|why| invalid(format!("max-content: {why}")))?,
        };
        Ok(Self {
            rules,
            git,
            max_content,
            digest: Digest::of(text.as_bytes()),
        })
    }

    /// The text of rules that use all built-in sets.
    #[must_use]
    pub const fn standard() -> &'static str {
        "sets = [\"all\"]\n"
    }

    /// The names of the built-in sets.
    pub fn set_names() -> impl Iterator<Item = &'static str> {
        SETS.iter().map(|set| set.name)
    }

    /// Digest of the file's text.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The first rule that decides about an entry without looking at its contents.
    pub(super) fn decide(&self, facts: &Facts<'_>) -> Option<&Rule> {
        let names = components(facts.path);
        self.rules
            .iter()
            .find(|rule| !rule.looks_inside() && rule.matches(facts, &names))
    }

    /// The rules that look at the contents of a file.
    pub(super) fn inside<'a>(&'a self, facts: &'a Facts<'a>) -> impl Iterator<Item = &'a Rule> {
        let names = components(facts.path);
        self.rules
            .iter()
            .filter(move |rule| rule.looks_inside() && rule.matches(facts, &names))
    }

    /// The same as a list.
    pub(super) fn inside_of(&self, facts: &Facts<'_>) -> Vec<&Rule> {
        let names = components(facts.path);
        let rules = self.rules.iter();
        rules
            .filter(|rule| rule.looks_inside() && rule.matches(facts, &names))
            .collect()
    }

    /// Whether any rule is about git's history.
    pub(crate) fn asks_git(&self) -> bool {
        !self.git.is_empty()
    }

    /// Whether any rule looks at contents.
    pub(super) fn looks_inside(&self) -> bool {
        self.rules.iter().any(Rule::looks_inside)
    }

    /// The first rule that a removed path would have been scrubbed or refused by, by its name
    /// alone.
    pub(super) fn names_removed(&self, path: &[u8]) -> Option<&Rule> {
        let names = components(path);
        self.rules.iter().find(|rule| {
            matches!(rule.action, Action::Scrub | Action::Forbid)
                && !rule.globs.is_empty()
                && rule.by_path_alone()
                && !rule.except.matches_any_prefix(&names, false)
                && (rule.globs.matches_any_prefix(&names, false)
                    || rule.globs.matches(&names, true))
        })
    }

    /// The names and paths without wildcards of the rules that scrub or forbid by path alone.
    pub(super) fn literals(&self) -> impl Iterator<Item = Literal> {
        self.rules
            .iter()
            .filter(|rule| rule.names_secrets())
            .flat_map(|rule| rule.globs.literals())
    }

    /// The rule of [`Rules::literals`] that a path would go by, if none that comes before keeps it.
    pub(super) fn names_untouched(&self, path: &[u8]) -> Option<&Rule> {
        let names = components(path);
        let named = |rule: &&Rule| {
            !rule.globs.is_empty()
                && rule.by_path_alone()
                && !rule.except.matches_any_prefix(&names, false)
                && (rule.globs.matches_any_prefix(&names, true) || rule.globs.matches_in(&names))
        };
        let rule = self
            .rules
            .iter()
            .filter(|rule| rule.action == Action::Keep || rule.names_secrets())
            .find(named)?;
        rule.names_secrets().then_some(rule)
    }
}

fn sets(wanted: &[String]) -> Result<Vec<Rule>> {
    if let Some(unknown) = wanted
        .iter()
        .find(|name| *name != "all" && !SETS.iter().any(|set| set.name == **name))
    {
        let known: Vec<&str> = SETS.iter().map(|set| set.name).collect();
        return Err(invalid(format!(
            "there is no set {unknown:?}; the sets are all, {}",
            known.join(", ")
        )));
    }
    let mut rules = Vec::new();
    for set in &SETS {
        if !wanted.iter().any(|name| name == "all" || name == set.name) {
            continue;
        }
        let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        let globs: Vec<String> = owned(set.globs);
        rules.push(Rule {
            name: set.name.to_owned(),
            action: set.action,
            globs: Globs::new("set", &globs)?,
            except: Globs::default(),
            types: Vec::new(),
            sizes: (None, None),
            times: (None, None),
            owners: Vec::new(),
            groups: Vec::new(),
            content: owned(set.content),
            text: Vec::new(),
            searched: set.searched(),
        });
    }
    Ok(rules)
}

impl Rule {
    fn new(rule: &FileRule, index: usize, now: i64) -> Result<Self, String> {
        let conditions = !rule.globs.is_empty()
            || !rule.types.is_empty()
            || rule.larger_than.is_some()
            || rule.smaller_than.is_some()
            || rule.older_than.is_some()
            || rule.newer_than.is_some()
            || !rule.owners.is_empty()
            || !rule.groups.is_empty()
            || !rule.content.is_empty()
            || !rule.text.is_empty();
        if !conditions {
            return Err("it has no condition and would match everything".to_owned());
        }
        if let Some(unknown) = rule.content.iter().find(|name| !secrets::is_known(name)) {
            return Err(format!(
                "there is no pattern {unknown:?} for contents; the patterns are all, {}",
                secrets::names().join(", ")
            ));
        }
        if rule.text.iter().any(String::is_empty) {
            return Err("a text is empty".to_owned());
        }
        let looks_inside = !rule.content.is_empty() || !rule.text.is_empty();
        if looks_inside && rule.action == Action::Keep {
            return Err("what is kept is kept without a look inside".to_owned());
        }
        let size = |text: &Option<String>| text.as_deref().map(bytes).transpose();
        let time = |text: &Option<String>| {
            text.as_deref().map(age).transpose().map(|age| {
                age.map(|age| now.saturating_sub(i64::try_from(age.as_secs()).unwrap_or(i64::MAX)))
            })
        };
        let ids = |list: &[Ids]| list.iter().map(range).collect::<Result<Vec<_>, _>>();
        let globs =
            |name: &str, list: &[String]| Globs::new(name, list).map_err(|error| error.to_string());
        Ok(Self {
            name: rule
                .name
                .clone()
                .unwrap_or_else(|| format!("rule {}", index + 1)),
            action: rule.action,
            globs: globs("globs", &rule.globs)?,
            except: globs("except", &rule.except)?,
            types: rule.types.clone(),
            sizes: (size(&rule.larger_than)?, size(&rule.smaller_than)?),
            times: (time(&rule.older_than)?, time(&rule.newer_than)?),
            owners: ids(&rule.owners)?,
            groups: ids(&rule.groups)?,
            content: rule.content.clone(),
            text: rule.text.clone(),
            searched: true,
        })
    }

    /// Whether it looks at contents.
    pub(super) fn looks_inside(&self) -> bool {
        !self.content.is_empty() || !self.text.is_empty()
    }

    fn by_path_alone(&self) -> bool {
        !self.looks_inside()
            && self.sizes == (None, None)
            && self.times == (None, None)
            && self.owners.is_empty()
            && self.groups.is_empty()
    }

    fn names_secrets(&self) -> bool {
        self.searched
            && matches!(self.action, Action::Scrub | Action::Forbid)
            && !self.globs.is_empty()
            && self.by_path_alone()
    }

    fn matches(&self, facts: &Facts<'_>, names: &[&[u8]]) -> bool {
        let directory = facts.kind == Type::Directory;
        let within = |ranges: &[(u32, u32)], id: u32| {
            ranges.is_empty() || ranges.iter().any(|(from, to)| (*from..=*to).contains(&id))
        };
        // Sizes are those of files.
        let sized = self.sizes == (None, None)
            || facts.kind == Type::File
                && self.sizes.0.is_none_or(|least| facts.size > least)
                && self.sizes.1.is_none_or(|most| facts.size < most);
        // Ages are not those of directories, whose times say nothing of what is in them.
        let timed = self.times == (None, None)
            || !directory
                && self.times.0.is_none_or(|before| facts.mtime < before)
                && self.times.1.is_none_or(|after| facts.mtime >= after);
        // A directory goes by its owner only if a pattern names it: others may have files in it.
        let owned = within(&self.owners, facts.uid) && within(&self.groups, facts.gid);
        let directories =
            !directory || !self.globs.is_empty() || self.types.contains(&Type::Directory);
        sized
            && timed
            && owned
            && directories
            && (self.types.is_empty() || self.types.contains(&facts.kind))
            && (self.globs.is_empty() || self.globs.matches(names, directory))
            && !self.except.matches_any_prefix(names, directory)
            && (!self.looks_inside() || facts.kind == Type::File)
    }
}

impl GitRule {
    fn new(rule: &FileGit, number: usize) -> Result<Self, String> {
        let hex = rule.newer_than.to_ascii_lowercase();
        let known = [40, 64].contains(&hex.len()) && hex.bytes().all(|b| b.is_ascii_hexdigit());
        if !known {
            return Err(format!(
                "newer-than = {:?} is no commit: write all 40 (or 64) digits of its id",
                rule.newer_than
            ));
        }
        Ok(Self {
            name: rule
                .name
                .clone()
                .unwrap_or_else(|| format!("git rule {number}")),
            at: Globs::new("at", &rule.at).map_err(|error| error.to_string())?,
            newer_than: hex,
        })
    }

    /// Whether it is about the repository whose git directory this is.
    pub(super) fn is_about(&self, directory: &[u8]) -> bool {
        self.at.is_empty() || self.at.matches_any_prefix(&components(directory), true)
    }
}

fn invalid(why: String) -> PackError {
    PackError::InvalidOption {
        option: "rules".to_owned(),
        why,
    }
}

/// `10m`: a number and k, m, g or t.
fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => 64,
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(1u64.checked_shl(shift)?))
        .ok_or_else(|| format!("{text:?} is no size: write a number and k, m, g or t"))
}

/// `7d`: a number and s, m, h, d or w.
fn age(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        "w" => 604_800,
        _ => 0,
    };
    number
        .parse::<u64>()
        .ok()
        .filter(|_| seconds > 0)
        .and_then(|n| n.checked_mul(seconds))
        .map(Duration::from_secs)
        .ok_or_else(|| format!("{text:?} is no length of time: write a number and s, m, h, d or w"))
}

fn split(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    text.split_at(end)
}

fn range(ids: &Ids) -> Result<(u32, u32), String> {
    match ids {
        Ids::One(id) => Ok((*id, *id)),
        Ids::Range(text) => text
            .split_once('-')
            .and_then(|(from, to)| Some((from.trim().parse().ok()?, to.trim().parse().ok()?)))
            .or_else(|| text.parse().ok().map(|id| (id, id)))
            .filter(|(from, to)| from <= to)
            .ok_or_else(|| format!("{text:?} is no range of ids: write them as \"1000-1999\"")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(day: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(day * 86_400)
    }

    fn decided(text: &str, facts: &Facts<'_>) -> Option<(String, Action)> {
        let rules = Rules::parse(text, at(100)).unwrap();
        rules
            .decide(facts)
            .map(|rule| (rule.name.clone(), rule.action))
    }

    fn file(path: &str) -> Facts<'_> {
        Facts {
            path: path.as_bytes(),
            kind: Type::File,
            size: 100,
            uid: 1000,
            gid: 1000,
            mtime: 90 * 86_400,
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let text = r#"
            sets = ["shell-history", "keys"]
            [[rule]]
            name = "mine"
            action = "keep"
            globs = ["/home/me/id_rsa"]
            [[rule]]
            action = "forbid"
            globs = ["*.answer"]
            except = ["/public/"]
        "#;
        let of = |path| decided(text, &file(path));
        assert_eq!(of("home/me/id_rsa"), Some(("mine".into(), Action::Keep)));
        assert_eq!(of("home/you/id_rsa"), Some(("keys".into(), Action::Scrub)));
        assert_eq!(of("a/x.answer"), Some(("rule 2".into(), Action::Forbid)));
        assert_eq!(of("public/x.answer"), None);
        assert_eq!(
            of("root/.bash_history"),
            Some(("shell-history".into(), Action::Scrub))
        );
        assert_eq!(of("root/notes"), None);
    }

    #[test]
    fn sizes_ages_owners_and_types() {
        let hit = |rule: &str, facts: Facts<'_>| {
            decided(&format!("[[rule]]\n{rule}\n"), &facts).is_some()
        };
        let base = file("a/b");
        assert!(hit("larger-than = \"99\"", base) && !hit("larger-than = \"100\"", base));
        assert!(hit("smaller-than = \"1k\"", base));
        assert!(hit("older-than = \"9d\"", base) && !hit("older-than = \"11d\"", base));
        assert!(hit("newer-than = \"2w\"", base) && !hit("newer-than = \"1h\"", base));
        assert!(hit("owners = [1000]", base) && hit("owners = [5, \"900-1100\"]", base));
        assert!(!hit("owners = [\"0-999\"]", base) && !hit("groups = [7]", base));
        assert!(hit("types = [\"file\"]", base) && !hit("types = [\"socket\"]", base));
        let directory = Facts {
            kind: Type::Directory,
            ..base
        };
        for rule in [
            "owners = [1000]",
            "larger-than = \"1\"",
            "older-than = \"1s\"",
        ] {
            assert!(!hit(rule, directory), "{rule}");
        }
        assert!(hit("globs = [\"b/\"]", directory) && !hit("globs = [\"b/\"]", base));
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, said) in [
            ("sets = [\"nonsense\"]", "shell-history"),
            ("[[rule]]\nname = \"x\"", "no condition"),
            ("[[rule]]\nglobs = [\"[a\"]", "rule 1"),
            ("[[rule]]\nlarger-than = \"big\"", "big"),
            ("[[rule]]\nolder-than = \"7\"", "length of time"),
            ("[[rule]]\nowners = [\"9-1\"]", "range"),
            ("[[rule]]\ncontent = [\"magic\"]", "private-key"),
            ("[[rule]]\naction = \"keep\"\ntext = [\"x\"]", "look inside"),
            ("[[rule]]\nglob = [\"x\"]", "line 2"),
            ("\n\nsets = 5", "line 3"),
            ("max-content = \"lots\"", "max-content"),
            ("[[git]]\nnewer-than = \"HEAD\"", "40"),
            ("[[rule]]\naction = \"eat\"\nglobs = [\"x\"]", "line 2"),
        ] {
            let error = Rules::parse(text, at(1)).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        Rules::parse(Rules::standard(), at(1)).unwrap();
    }

    #[test]
    fn removed_paths_go_by_name() {
        let text = "sets = [\"ssh\"]\n[[rule]]\nglobs = [\"*.key\"]\nlarger-than = \"5\"\n";
        let rules = Rules::parse(text, at(1)).unwrap();
        assert!(rules.names_removed(b"root/.ssh").is_some());
        assert!(rules.names_removed(b"root/.ssh/id").is_some());
        assert!(rules.names_removed(b"a.key").is_none());
    }
}
