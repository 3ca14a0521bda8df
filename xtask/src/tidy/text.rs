//! Rules over one file's text.

use std::path::Path;

/// Longest Rust source file, in lines.
const MAX_LINES: usize = 800;

/// Unfinished or unwatched code. Halves are joined so that this file holds none of them.
const FORBIDDEN_CODE: [&str; 4] = [
    concat!("to", "do!"),
    concat!("unimple", "mented!"),
    concat!("db", "g!("),
    concat!("#![allow(warn", "ings"),
];

/// An attribute that keeps a test from running, and the only reasons for it: it is no test but a
/// program that a test starts, or that a developer runs to make golden files.
const IGNORE: &str = concat!("#[ig", "nore");
const CHILD: &str = " = \"a child process of another test\"]";
const GENERATOR: &str = " = \"writes files for committing\"]";

/// Hosts of package registries: what to fetch from is the machine's setting, not ours.
const FORBIDDEN_HOSTS: [&str; 7] = [
    concat!("deb.deb", "ian.org"),
    concat!("pypi", ".org"),
    concat!("files.python", "hosted"),
    concat!("static.crates", ".io"),
    concat!("index.crates", ".io"),
    concat!("registry.npm", "js"),
    concat!("security.deb", "ian.org"),
];

/// Directories of one machine.
const FORBIDDEN_PATHS: [&str; 2] = [concat!("/wo", "rk/"), concat!("/fa", "rm/")];

/// Breaches in the file `name`, relative to the workspace at `root`.
pub(super) fn check(name: &str, content: &str, root: &Path) -> Vec<String> {
    let mut breaches = Vec::new();
    if name != "Cargo.lock" {
        places(name, content, root, &mut breaches);
    }
    if name.ends_with("Cargo.toml") {
        manifest(name, content, &mut breaches);
    }
    if name.ends_with(".rs") {
        source(name, content, &mut breaches);
    }
    breaches
}

fn places(name: &str, content: &str, root: &Path, breaches: &mut Vec<String>) {
    let root = root.to_string_lossy();
    for (number, line) in (1..).zip(content.lines()) {
        for host in FORBIDDEN_HOSTS {
            if line.contains(host) {
                breaches.push(format!("{name}:{number}: names the registry host {host}"));
            }
        }
        let own = FORBIDDEN_PATHS.iter().any(|path| starts_path(line, path));
        if own || (root.len() > 1 && starts_path(line, &root)) {
            breaches.push(format!("{name}:{number}: names a directory of one machine"));
        }
    }
}

/// Whether `path` stands in `line` as the beginning of an absolute path.
fn starts_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        before.is_none_or(|c| !c.is_alphanumeric())
    })
}

fn manifest(name: &str, content: &str, breaches: &mut Vec<String>) {
    if name == "Cargo.toml" {
        return;
    }
    let shared = content.contains("[lints]\nworkspace = true");
    if name == "crates/sys/Cargo.toml" {
        if !content.contains("[lints") {
            breaches.push(format!("{name}: has no [lints]"));
        }
    } else if !shared {
        breaches.push(format!(
            "{name}: must take the workspace's lints: [lints] workspace = true"
        ));
    }
}

fn source(name: &str, content: &str, breaches: &mut Vec<String>) {
    let lines = content.lines().count();
    if lines > MAX_LINES {
        breaches.push(format!("{name}: {lines} lines, over {MAX_LINES}: split it"));
    }
    if !content.trim_start().starts_with("//!") {
        breaches.push(format!(
            "{name}: does not begin with a //! header that gives its design"
        ));
    }
    for (number, line) in (1..).zip(content.lines()) {
        for word in FORBIDDEN_CODE {
            if line.contains(word) {
                breaches.push(format!("{name}:{number}: {word} is not allowed"));
            }
        }
        if let Some((_, reason)) = line.split_once(IGNORE)
            && ![CHILD, GENERATOR].contains(&reason)
        {
            breaches.push(format!(
                "{name}:{number}: a test must run, or say why with skip!"
            ));
        }
        if !name.starts_with("crates/sys/") && is_unsafe(line) {
            breaches.push(format!(
                "{name}:{number}: unsafe code belongs in crates/sys"
            ));
        }
    }
}

/// Whether a line holds the keyword, outside a comment and in a place where code has it.
fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    ["{", "fn ", "impl ", "extern ", "trait "]
        .iter()
        .any(|what| code.contains(&format!("{} {what}", concat!("uns", "afe"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaches(name: &str, content: &str) -> Vec<String> {
        check(name, content, Path::new("/some/clone"))
    }

    #[test]
    fn a_clean_file_passes() {
        let clean = "//! Header.\n\n/// A file in `up/work/x`, not unsafe.\nfn f() {}\n";
        assert_eq!(breaches("crates/a/src/lib.rs", clean), Vec::<String>::new());
    }

    #[test]
    fn every_rule_of_source_files_bites() {
        let long = format!("//! H\n{}", "\n".repeat(MAX_LINES));
        let unsafe_line = format!("//! H\nfn f() {{ {} {{ g() }} }}", concat!("uns", "afe"));
        let mut cases = vec![
            ("fn f() {}".to_owned(), 1),
            (long, 1),
            (unsafe_line.clone(), 1),
        ];
        cases.extend(FORBIDDEN_CODE.map(|word| (format!("//! H\n    {word}"), 1)));
        for (content, count) in cases {
            assert_eq!(
                breaches("crates/a/src/x.rs", &content).len(),
                count,
                "{content:.60}"
            );
        }
        assert!(breaches("crates/sys/src/x.rs", &unsafe_line).is_empty());
        for (reason, count) in [("]", 1), (" = \"slow\"]", 1), (CHILD, 0), (GENERATOR, 0)] {
            let content = format!("//! H\n{IGNORE}{reason}\nfn f() {{}}");
            assert_eq!(
                breaches("crates/a/tests/x.rs", &content).len(),
                count,
                "{reason}"
            );
        }
    }

    #[test]
    fn hosts_and_machine_paths_are_found_in_any_file() {
        for host in FORBIDDEN_HOSTS {
            assert_eq!(
                breaches("README.md", &format!("see https://{host}/x")).len(),
                1
            );
            assert!(breaches("Cargo.lock", host).is_empty());
        }
        for path in FORBIDDEN_PATHS {
            assert_eq!(breaches("a.sh", &format!("cd {path}x")).len(), 1);
            assert!(breaches("a.sh", &format!("cd up{path}x")).is_empty());
        }
        assert_eq!(breaches("a.md", "in /some/clone/target").len(), 1);
    }

    #[test]
    fn manifests_take_the_shared_lints() {
        assert_eq!(breaches("crates/a/Cargo.toml", "[package]\n").len(), 1);
        assert!(breaches("crates/a/Cargo.toml", "[lints]\nworkspace = true\n").is_empty());
    }
}
