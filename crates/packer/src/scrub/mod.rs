//! Keeps out of a snapshot what rules say must not leave.
//!
//! Paths, sizes, times and owners are judged while the upper is scanned, contents when they are
//! read and before anything of them is stored. What is scrubbed takes away what the sandbox wrote,
//! never what it took away: whiteouts and opaque marks stay, with the directories that carry them.
//! SEMANTICS.md, "Scrubbing", has the whole of it.

mod below;
mod history;
mod links;
mod report;
mod rules;
mod secrets;
mod sets;
mod stream;
mod untouched;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use layerpack_erofs::Metadata;
use rustix::fs::FileType;

pub use below::LowerLayer;
pub(crate) use history::objects::{Files, ReadAt};
pub use report::{Finding, Findings, ScrubReport, StillBelow, Tally};
pub use rules::Rules;

use crate::error::PackError;
use crate::model::Layer;
use history::{Fate, History};
use rules::{Action, Facts, GitRule, Rule, Type};
use stream::Search;

/// Most paths that are looked up in the layers below.
const MOST_BELOW: usize = 10_000;
/// Forbidden paths that an error names.
const NAMED: usize = 5;

/// What is to happen to an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is packed.
    Pack,
    /// It is left out.
    Leave,
    /// A directory goes if nothing that stays is in it.
    IfEmpty,
}

/// How the contents of a file are to be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Look {
    /// Not at all.
    Not,
    /// With all of it in memory.
    Whole,
    /// A piece at a time.
    Stream,
}

/// What is to happen to a file by what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Judged {
    /// It is packed.
    Pack,
    /// It is left out.
    Leave,
    /// It is packed with these contents in place of its own.
    Instead(Vec<u8>),
}

/// Rules at work on one upper.
pub(crate) struct Scrub<'a> {
    rules: &'a Rules,
    state: Mutex<State>,
    history: Mutex<History>,
}

#[derive(Default)]
struct State {
    report: ScrubReport,
    /// Directories that a rule took.
    inside: HashMap<Vec<u8>, Taken>,
    /// Directories to take out if nothing is left in them, parents first.
    emptied: Vec<Vec<u8>>,
    /// Paths to look up in the layers below.
    below: Vec<Asked>,
    /// Files with several names, by device and inode.
    linked: HashMap<(u64, u64), Linked>,
    /// What decided about the last entry, if a rule did.
    by: Option<(Action, String)>,
    /// Of rules about git's history: whether a repository that was looked at has the commit.
    git: BTreeMap<String, bool>,
}

/// A path to look up in the layers below.
#[derive(Debug)]
struct Asked {
    path: Vec<u8>,
    /// The rule that speaks of it.
    rule: String,
    /// Whether the new layer hides it.
    hidden: bool,
    /// A directory stands for all in it that is not asked for by itself, and is nothing if there is
    /// nothing else.
    whole: bool,
    /// The rule is one about git's history: the layer may hold another content that it has nothing
    /// against.
    git: bool,
}

/// A file with several names.
#[derive(Debug, Default)]
struct Linked {
    /// The rule that left one of its names out.
    taken: Option<String>,
    /// A rule keeps one of its names.
    kept: bool,
    /// Those that were not left out.
    names: Vec<Vec<u8>>,
    size: u64,
}

/// By what a directory was taken.
#[derive(Debug, Clone)]
struct Taken {
    rule: String,
    /// Where the report names it.
    place: Option<usize>,
}

impl<'a> Scrub<'a> {
    /// Begins with nothing seen of an upper and the layers below it.
    pub(crate) fn new(rules: &'a Rules, upper: &Path, lowers: &[LowerLayer]) -> Self {
        let lowers = lowers.iter().map(|lower| lower.path.as_path());
        let roots = [upper].into_iter().chain(lowers);
        let files = match rules.git.is_empty() {
            true => Vec::new(),
            false => history::mounted(roots),
        };
        Self::over(rules, files)
    }

    /// The same, with git's objects in the files of these layers, topmost first.
    pub(crate) fn over(rules: &'a Rules, files: Vec<Box<dyn Files>>) -> Self {
        Self {
            rules,
            state: Mutex::default(),
            history: Mutex::new(History::new(files)),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what was seen: the upper is scanned anew.
    pub(crate) fn restart(&self) {
        *self.state() = State::default();
    }

    /// Judges an entry by all but its contents.
    pub(crate) fn entry(
        &self,
        path: &[u8],
        kind: FileType,
        size: u64,
        metadata: &Metadata,
    ) -> Verdict {
        let Some(facts) = facts(path, kind, size, metadata) else {
            return Verdict::Pack; // the root
        };
        let directory = facts.kind == Type::Directory;
        let rule = self.rules.decide(&facts);
        let mut state = self.state();
        let state = &mut *state;
        state.by = rule.map(|rule| (rule.action, rule.name.clone()));
        let parent = parent(path);
        match rule.map(|rule| (rule, rule.action)) {
            Some((rule, Action::Keep)) => {
                if !directory {
                    state.report.kept.add(size);
                }
                state
                    .report
                    .kept_by_rule
                    .push(finding(path, rule, directory, size));
                return Verdict::Pack;
            }
            Some((rule, Action::Forbid)) => {
                state
                    .report
                    .forbidden
                    .push(finding(path, rule, directory, size));
            }
            Some((rule, Action::Scrub)) if !state.inside.contains_key(parent) => {
                let place = state
                    .report
                    .scrubbed
                    .push(finding(path, rule, directory, size));
                if directory {
                    let rule = rule.name.clone();
                    state.inside.insert(path.to_vec(), Taken { rule, place });
                    state.emptied.push(path.to_vec());
                    return Verdict::IfEmpty;
                }
                state.ask_below(path, &rule.name, false);
                return Verdict::Leave;
            }
            Some((rule, Action::Suspicious)) if !state.inside.contains_key(parent) => {
                state
                    .report
                    .suspicious
                    .push(finding(path, rule, directory, size));
            }
            _ => {}
        }
        if let Some(taken) = state.inside.get(parent).cloned() {
            if directory {
                state.inside.insert(path.to_vec(), taken);
                state.emptied.push(path.to_vec());
                return Verdict::IfEmpty;
            }
            state.report.scrubbed.below(taken.place, size);
            state.ask_below(path, &taken.rule, false);
            state.by = Some((Action::Scrub, taken.rule));
            return Verdict::Leave;
        }
        if !directory {
            state.report.kept.add(size);
        }
        Verdict::Pack
    }

    /// Takes note of the verdict about one of several names of a file: the last entry.
    pub(crate) fn name_of(&self, inode: (u64, u64), path: &[u8], size: u64, verdict: Verdict) {
        let mut state = self.state();
        let by = state.by.take();
        let linked = state.linked.entry(inode).or_default();
        linked.size = size;
        match verdict {
            Verdict::Leave => {
                let rule = by.map(|(_, rule)| rule).unwrap_or_default();
                linked.taken.get_or_insert(rule);
            }
            Verdict::Pack | Verdict::IfEmpty => {
                linked.kept |= by.is_some_and(|(action, _)| action == Action::Keep);
                linked.names.push(path.to_vec());
            }
        }
    }

    /// Whether a file goes with one of its names, that rules left out, unless one of them is kept
    /// by a rule. Its other names are in the report then.
    pub(crate) fn takes_links(&self, inode: (u64, u64)) -> bool {
        let mut state = self.state();
        let state = &mut *state;
        let Some(linked) = state.linked.get_mut(&inode) else {
            return false;
        };
        let Some(rule) = linked.taken.clone().filter(|_| !linked.kept) else {
            return false;
        };
        let (names, size) = (std::mem::take(&mut linked.names), linked.size);
        for path in names {
            state.report.kept.take(size);
            state.report.scrubbed.push(Finding {
                path: format!("/{}", crate::show(&path)),
                rule: rule.clone(),
                pattern: Some("hard-link".to_owned()),
                entries: 1,
                bytes: size,
            });
            state.ask_below(&path, &rule, false);
        }
        true
    }

    /// Takes note of a removed path.
    pub(crate) fn removed(&self, path: &[u8]) {
        if let Some(rule) = self.rules.names_removed(path) {
            self.state().ask_below(path, &rule.name, true);
        }
    }

    /// Directories that a rule took, parents first.
    pub(crate) fn emptied(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.state().emptied)
    }

    /// Whether contents have to be looked at.
    pub(crate) fn looks_inside(&self) -> bool {
        self.rules.looks_inside() || !self.rules.git.is_empty()
    }

    /// How rules look at the contents of a file of `size` bytes. One that is too large for a mere
    /// suspicion is counted.
    pub(crate) fn wants(&self, path: &[u8], size: u64, metadata: &Metadata) -> Look {
        let Some(facts) = facts(path, FileType::RegularFile, size, metadata) else {
            return Look::Not;
        };
        let git = !self.rules.git.is_empty() && history::named(path).is_some();
        if !git && self.rules.inside(&facts).next().is_none() {
            return Look::Not;
        }
        if size <= self.rules.max_content || git && size <= history::MOST_READ {
            return Look::Whole;
        }
        let suspects = |rule: &Rule| rule.action == Action::Suspicious;
        if let Some(rule) = self.rules.inside(&facts).find(|rule| suspects(rule)) {
            let found = finding(path, rule, false, size);
            self.state().report.too_large.push(found);
        }
        match git || self.rules.inside(&facts).any(|rule| !suspects(rule)) {
            true => Look::Stream,
            false => Look::Not,
        }
    }

    /// Begins to look at contents a piece at a time, for what must not leave.
    pub(crate) fn search(&self, path: &[u8], size: u64, metadata: &Metadata) -> Search<'a> {
        let facts = facts(path, FileType::RegularFile, size, metadata);
        let rules = match &facts {
            Some(facts) if !self.keeps(facts) => self.rules.inside_of(facts),
            _ => Vec::new(),
        };
        let bound = |rule: &&Rule| rule.action != Action::Suspicious;
        Search::new(rules.into_iter().filter(bound).collect())
    }

    /// Judges a file by what such a look found in all of it.
    pub(crate) fn searched(&self, path: &[u8], size: u64, search: Search<'_>) -> Judged {
        if size > history::MOST_READ && self.is_unreadable(path, size) {
            return Judged::Leave;
        }
        match search.found() {
            Some((rule, pattern)) => self.held(path, rule, pattern, size),
            None => Judged::Pack,
        }
    }

    fn keeps(&self, facts: &Facts<'_>) -> bool {
        let rule = self.rules.decide(facts);
        rule.is_some_and(|rule| rule.action == Action::Keep)
    }

    /// What comes of a rule whose pattern a file holds.
    fn held(&self, path: &[u8], rule: &Rule, pattern: String, size: u64) -> Judged {
        let mut found = finding(path, rule, false, size);
        found.pattern = Some(pattern);
        let mut state = self.state();
        match rule.action {
            Action::Forbid => {
                state.report.forbidden.push(found);
            }
            Action::Scrub => {
                state.report.kept.take(size);
                state.report.scrubbed.push(found);
                state.ask_below(path, &rule.name, false);
                return Judged::Leave;
            }
            Action::Suspicious => {
                state.report.suspicious.push(found);
            }
            Action::Keep => {}
        }
        Judged::Pack
    }

    /// Judges a file by its contents.
    pub(crate) fn contents(&self, path: &[u8], bytes: &[u8], metadata: &Metadata) -> Judged {
        let size = bytes.len() as u64;
        let Some(facts) = facts(path, FileType::RegularFile, size, metadata) else {
            return Judged::Pack;
        };
        // A rule that keeps a file keeps it from this too.
        if self.keeps(&facts) {
            return Judged::Pack;
        }
        match self.history(path, bytes) {
            Judged::Pack => {}
            judged => return judged,
        }
        for rule in self.rules.inside(&facts) {
            let hit = secrets::find(bytes, &rule.content).map(|hit| hit.pattern);
            let text = || {
                let held = |text: &&String| secrets::holds(bytes, text.as_bytes());
                rule.text.iter().find(held).map(|_| "text")
            };
            let Some(pattern) = hit.or_else(text) else {
                continue;
            };
            return self.held(path, rule, pattern.to_owned(), size);
        }
        Judged::Pack
    }

    /// Judges a file of git by the commits that it names.
    fn history(&self, path: &[u8], bytes: &[u8]) -> Judged {
        if self.rules.git.is_empty() {
            return Judged::Pack;
        }
        let Some(named) = history::named(path) else {
            return Judged::Pack;
        };
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = bytes.to_vec();
        let whole = bytes.len();
        let mut by = None;
        for rule in self.git_rules(named.directory) {
            // A repository that does not have the commit is another one.
            let limit = history.commit(named.directory, &rule.newer_than);
            self.state().git_of(&rule.name, limit.is_some());
            let Some(limit) = limit else { continue };
            if history::is_unread(&named) {
                let found = by_git(path, rule, "reftable", whole as u64);
                self.state().report.suspicious.push(found);
                continue;
            }
            match history.fate(&named, &bytes, &limit) {
                Fate::Stays => {}
                Fate::Goes(why) => {
                    self.goes_by_git(path, rule, why.word(), whole as u64);
                    return Judged::Leave;
                }
                Fate::Shorter(left, why) => {
                    bytes = left;
                    by = Some((rule, why));
                }
            }
        }
        let Some((rule, why)) = by else {
            return Judged::Pack;
        };
        let less = (whole - bytes.len()) as u64;
        let found = by_git(path, rule, why.word(), less);
        self.state().report.shortened.push(found);
        Judged::Instead(bytes)
    }

    /// Whether a file of git is too large to be looked into and goes for that.
    fn is_unreadable(&self, path: &[u8], size: u64) -> bool {
        let Some(named) = history::named(path) else {
            return false;
        };
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        for rule in self.git_rules(named.directory) {
            let has = history.commit(named.directory, &rule.newer_than).is_some();
            self.state().git_of(&rule.name, has);
            if has {
                self.goes_by_git(path, rule, "too-large", size);
                return true;
            }
        }
        false
    }

    fn git_rules<'r>(&'r self, repository: &'r [u8]) -> impl Iterator<Item = &'r GitRule> {
        let rules = self.rules.git.iter();
        rules.filter(move |rule| rule.is_about(repository))
    }

    fn goes_by_git(&self, path: &[u8], rule: &GitRule, why: &str, size: u64) {
        let mut state = self.state();
        state.report.kept.take(size);
        state.report.scrubbed.push(by_git(path, rule, why, size));
        state.ask(path, &rule.name, false, true);
    }

    /// The error of what rules forbid, if they do.
    pub(crate) fn refusal(&self) -> Option<PackError> {
        let state = self.state();
        let forbidden = &state.report.forbidden;
        let first = forbidden.named.first()?;
        let names: Vec<String> = forbidden
            .named
            .iter()
            .take(NAMED)
            .map(|found| format!("{} ({})", found.path, found.rule))
            .collect();
        let more = forbidden.named.len().saturating_sub(NAMED);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        Some(PackError::Forbidden {
            rule: first.rule.clone(),
            paths: format!("{}{more}", names.join(", ")),
        })
    }

    /// What was done to make `layer`; looks into the layers below for what rules spoke of.
    pub(crate) fn report(&self, lowers: &[LowerLayer], layer: &Layer) -> ScrubReport {
        let mut state = std::mem::take(&mut *self.state());
        let mut asked = std::mem::take(&mut state.below);
        asked.extend(untouched::find(self.rules, lowers, layer, &asked));
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_newer = |root: &OwnedFd, asked: &Asked| {
            history::names_newer(
                &self.rules.git,
                &mut history,
                root,
                &asked.path,
                &asked.rule,
            )
        };
        state.report.still_below = below::find(lowers, layer, asked, &mut is_newer);
        let seen = history::find(&self.rules.git, &mut history, lowers, layer);
        drop(history);
        for (rule, has) in &seen.rules {
            state.git_of(rule, *has);
        }
        state.report.git_below = seen.found;
        state.report.git_unseen = seen.unseen;
        state.report.idle_git = state
            .git
            .into_iter()
            .filter_map(|(rule, has)| (!has).then_some(rule))
            .collect();
        state.report.rules = Some(self.rules.digest().to_string());
        state.report
    }
}

impl State {
    fn git_of(&mut self, rule: &str, has: bool) {
        *self.git.entry(rule.to_owned()).or_default() |= has;
    }

    fn ask_below(&mut self, path: &[u8], rule: &str, hidden: bool) {
        self.ask(path, rule, hidden, false);
    }

    fn ask(&mut self, path: &[u8], rule: &str, hidden: bool, git: bool) {
        if self.below.len() < MOST_BELOW {
            self.below.push(Asked {
                path: path.to_vec(),
                rule: rule.to_owned(),
                hidden,
                whole: false,
                git,
            });
        }
    }
}

fn facts<'a>(path: &'a [u8], kind: FileType, size: u64, metadata: &Metadata) -> Option<Facts<'a>> {
    if path.is_empty() {
        return None;
    }
    let kind = match kind {
        FileType::RegularFile => Type::File,
        FileType::Directory => Type::Directory,
        FileType::Symlink => Type::Symlink,
        FileType::Socket => Type::Socket,
        FileType::Fifo => Type::Fifo,
        FileType::CharacterDevice | FileType::BlockDevice | FileType::Unknown => Type::Device,
    };
    Some(Facts {
        path,
        kind,
        size: if kind == Type::File { size } else { 0 },
        uid: metadata.uid,
        gid: metadata.gid,
        mtime: metadata.mtime.sec,
    })
}

fn finding(path: &[u8], rule: &Rule, directory: bool, size: u64) -> Finding {
    let end = if directory { "/" } else { "" };
    Finding {
        path: format!("/{}{end}", crate::show(path)),
        rule: rule.name.clone(),
        pattern: None,
        entries: u64::from(!directory),
        bytes: if directory { 0 } else { size },
    }
}

fn by_git(path: &[u8], rule: &GitRule, why: &str, bytes: u64) -> Finding {
    Finding {
        path: format!("/{}", crate::show(path)),
        rule: rule.name.clone(),
        pattern: Some(why.to_owned()),
        entries: 1,
        bytes,
    }
}

fn parent(path: &[u8]) -> &[u8] {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => path.get(..at).unwrap_or_default(),
        None => b"",
    }
}
