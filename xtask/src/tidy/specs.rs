//! Specs beside types: every structure of a byte format has its size held by an assertion, and
//! stands in a file that names its spec.
//!
//! A structure of a format is one that is `repr(C)` in a crate that owns a `FORMAT.md`. Whoever
//! changes it must find the text, so its source file names `FORMAT.md`, and if it names a section,
//! that section exists; whoever changes it by accident must be found by the compiler, so a `const`
//! assertion on its `size_of` stands in the same file; and when the size changes with purpose, the
//! spec must follow, so a size that is asserted as a number must stand in the spec too.

/// Crates that own formats or promises, and the file that says what they are.
const SPECS: [(&str, &str); 4] = [
    ("crates/erofs", "FORMAT.md"),
    ("crates/store", "FORMAT.md"),
    ("crates/layerfs", "SEMANTICS.md"),
    ("crates/runtime", "THREATS.md"),
];

/// Breaches in all files of the repository, given as name and content.
pub(super) fn check(files: &[(String, String)]) -> Vec<String> {
    let mut breaches = Vec::new();
    for (folder, spec) in SPECS {
        let path = format!("{folder}/{spec}");
        let Some((_, text)) = files.iter().find(|(name, _)| *name == path) else {
            breaches.push(format!("{path}: missing"));
            continue;
        };
        if spec != "FORMAT.md" {
            continue;
        }
        let sources = format!("{folder}/src/");
        for (name, content) in files.iter().filter(|(name, _)| name.starts_with(&sources)) {
            breaches.extend(check_file(name, content, &path, text));
        }
    }
    breaches
}

/// Breaches in one source file of a crate whose spec is `text`, at `path`.
fn check_file(name: &str, content: &str, path: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    let structures = structures(content);
    if structures.is_empty() {
        return breaches;
    }
    if !content.contains("FORMAT.md") {
        breaches.push(format!(
            "{name}: does not say that {path} describes its structures"
        ));
    }
    for (_, rest) in content
        .lines()
        .filter_map(|line| line.split_once("section \""))
    {
        let section = rest.split('"').next().unwrap_or_default();
        let found = text.lines().any(|line| {
            line.strip_prefix('#')
                .is_some_and(|heading| heading.contains(section))
        });
        if !found {
            breaches.push(format!("{name}: {path} has no section \"{section}\""));
        }
    }
    for structure in structures {
        let size = format!("size_of::<{structure}>()");
        let asserted = content
            .lines()
            .filter(|line| line.contains("assert!("))
            .find_map(|line| Some(line.split_once(&size)?.1));
        let Some(asserted) = asserted else {
            breaches.push(format!("{name}: the size of {structure} is not asserted"));
            continue;
        };
        let number: String = asserted
            .chars()
            .skip_while(|c| " =".contains(*c))
            .take_while(char::is_ascii_digit)
            .collect();
        let words = |c: char| !c.is_alphanumeric() && c != '_';
        if !number.is_empty() && !text.split(words).any(|word| word == number) {
            breaches.push(format!(
                "{name}: {structure} has {number} bytes, which {path} never says"
            ));
        }
    }
    breaches
}

/// Names of the `repr(C)` structures in a source file.
fn structures(content: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut wanted = false;
    for line in content.lines() {
        let line = line.trim();
        wanted |= line.starts_with(concat!("#[re", "pr(C"));
        if let Some((_, rest)) = line.split_once("struct ")
            && wanted
        {
            wanted = false;
            let end = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            found.extend(rest.get(..end));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(spec: &str, source: &str) -> Vec<(String, String)> {
        let mut files: Vec<(String, String)> = SPECS
            .iter()
            .map(|(folder, name)| (format!("{folder}/{name}"), String::new()))
            .collect();
        files[1].1 = spec.to_owned();
        files.push(("crates/store/src/pack.rs".to_owned(), source.to_owned()));
        files
    }

    const SOURCE: &str = concat!(
        "//! FORMAT.md, section \"Footer\".\n",
        "#[re",
        "pr(C)]\n#[derive(Clone)]\npub(crate) struct Footer {\n}\n",
        "const _: () = assert!(size_of::<Footer>() == 64);\nstruct Other;\n"
    );
    const SPEC: &str = "# Footer\nIt has 64 bytes.";

    #[test]
    fn a_described_and_asserted_structure_passes() {
        assert_eq!(check(&files(SPEC, SOURCE)), Vec::<String>::new());
        let named = SOURCE.replace("== 64", "as u64 == FOOTER_LEN");
        assert_eq!(check(&files(SPEC, &named)), Vec::<String>::new());
    }

    #[test]
    fn undescribed_unasserted_and_missing_are_found() {
        let count = |spec: &str, source: &str| check(&files(spec, source)).len();
        assert_eq!(count("# Footer\nIt has 164 bytes.", SOURCE), 1);
        assert_eq!(count("# Trailer\nIt has 64 bytes.", SOURCE), 1);
        assert_eq!(count(SPEC, &SOURCE.replace("size_of", "align_of")), 1);
        assert_eq!(count(SPEC, &SOURCE.replace("FORMAT.md", "some text")), 1);
        assert_eq!(check(&[]).len(), 4);
    }
}
