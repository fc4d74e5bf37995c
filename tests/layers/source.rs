//! Reads Rust as far as the layers need it: which paths a source names outside of its tests.

use std::path::{Path, PathBuf};

/// Every path of two or more names, those in the braces of a `use` put together.
pub fn paths(code: &[u8]) -> Vec<(usize, Vec<String>)> {
    let (mut found, mut at) = (Vec::new(), 0);
    while at < code.len() {
        if is_name(code[at]) {
            at = path(code, at, &[], &mut found);
        } else {
            at += 1;
        }
    }
    found
}

/// Reads a path that starts at `at`; the answer is where to go on.
fn path(code: &[u8], at: usize, prefix: &[String], found: &mut Vec<(usize, Vec<String>)>) -> usize {
    let mut names = prefix.to_vec();
    let mut end = at;
    loop {
        let start = end;
        end += code[end..].iter().take_while(|byte| is_name(**byte)).count();
        names.push(String::from_utf8_lossy(&code[start..end]).into_owned());
        let next = blank(code, end);
        if !code[next..].starts_with(b"::") {
            break;
        }
        let after = blank(code, next + 2);
        match code.get(after) {
            Some(byte) if is_name(*byte) => end = after,
            Some(b'{') => return group(code, after + 1, &names, found),
            Some(b'*') => {
                names.push("*".to_owned());
                end = after + 1;
                break;
            }
            _ => break,
        }
    }
    if names.len() > 1 {
        found.push((at, names));
    }
    end
}

/// The members of `prefix::{…}`.
fn group(code: &[u8], mut at: usize, prefix: &[String], found: &mut Vec<(usize, Vec<String>)>) -> usize {
    loop {
        at = blank(code, at);
        match code.get(at) {
            None => return at,
            Some(b'}') => return at + 1,
            Some(b'*') => {
                found.push((at, [prefix, &["*".to_owned()]].concat()));
                at += 1;
            }
            Some(byte) if is_name(*byte) => {
                at = path(code, at, prefix, found);
                let renamed = blank(code, at);
                if code[renamed..].starts_with(b"as ") {
                    at = blank(code, renamed + 3);
                    at += code[at..].iter().take_while(|byte| is_name(**byte)).count();
                }
            }
            Some(_) => at += 1,
        }
    }
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// The first place from `at` on that is not white.
fn blank(code: &[u8], at: usize) -> usize {
    at + code[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

/// A source whose comments, literals and test code are blanks, every other byte where it was.
pub struct Stripped {
    pub code: Vec<u8>,
    /// The modules that are compiled for tests alone: the path that was given, or the name.
    test_modules: Vec<(Option<String>, String)>,
}

impl Stripped {
    /// Where those modules lie, of which `file` is the parent.
    pub fn test_files(&self, file: &Path) -> Vec<PathBuf> {
        let dir = file.parent().unwrap();
        let root = file.file_stem().is_some_and(|stem| stem == "mod" || stem == "lib" || stem == "main");
        let children = if root { dir.to_owned() } else { file.with_extension("") };
        let place = |(given, name): &(Option<String>, String)| match given {
            Some(given) => dir.join(given),
            None => children.join(format!("{name}.rs")),
        };
        self.test_modules.iter().map(place).collect()
    }
}

pub fn strip(text: &str) -> Stripped {
    const TEST: &[u8] = b"#[cfg(test)]";
    let mut code = without_literals(text.as_bytes());
    let mut test_modules = Vec::new();
    let mut from = 0;
    while let Some(start) = code[from..].windows(TEST.len()).position(|window| window == TEST).map(|at| from + at) {
        let mut item = blank(&code, start + TEST.len());
        let mut given = None;
        while code[item..].starts_with(b"#[") {
            let end = item + code[item..].iter().position(|byte| *byte == b']').unwrap_or(0);
            if code[item..].starts_with(b"#[path") {
                given = text[item..end].split('"').nth(1).map(str::to_owned);
            }
            item = blank(&code, end + 1);
        }
        let end = item_end(&code, item);
        let words = String::from_utf8_lossy(&code[item..end]).into_owned();
        if let Some(name) = words.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';')) {
            test_modules.push((given, name.trim().to_owned()));
        }
        for byte in &mut code[start..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        from = end;
    }
    Stripped { code, test_modules }
}

/// The end of an item: its semicolon, or the brace that closes its body. The braces of a `use` are none.
fn item_end(code: &[u8], start: usize) -> usize {
    let import = code[start..].starts_with(b"use ");
    let mut depth = 0usize;
    for (at, byte) in code.iter().enumerate().skip(start) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                if *byte == b'}' && depth == 0 && !import {
                    return at + 1;
                }
            }
            b';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

/// Comments, strings and characters become blanks.
fn without_literals(text: &[u8]) -> Vec<u8> {
    let mut code = text.to_vec();
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let after_name = at > 0 && is_name(text[at - 1]);
        let hashes = rest.iter().skip(1).take_while(|byte| **byte == b'#').count();
        let end = if rest.starts_with(b"//") {
            rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len())
        } else if rest.starts_with(b"/*") {
            find(rest, b"*/").map_or(rest.len(), |end| end + 2)
        } else if rest[0] == b'r' && !after_name && rest.get(1 + hashes) == Some(&b'"') {
            let close = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
            let body = 2 + hashes;
            find(&rest[body..], &close).map_or(rest.len(), |end| body + end + close.len())
        } else if rest[0] == b'"' {
            quoted(rest, b'"')
        } else if rest[0] == b'\'' && is_character(rest) {
            quoted(rest, b'\'')
        } else {
            at += 1;
            continue;
        };
        for byte in &mut code[at..at + end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at += end;
    }
    code
}

/// A character has a closing quote; a lifetime has none.
fn is_character(rest: &[u8]) -> bool {
    let text = String::from_utf8_lossy(&rest[1..rest.len().min(8)]).into_owned();
    let mut chars = text.chars();
    match chars.next() {
        Some('\\') => true,
        Some(_) => chars.next() == Some('\''),
        None => false,
    }
}

fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_the_files_that_are_compiled_for_tests_alone() {
        let text = "#[cfg(test)]\nmod samples;\n#[cfg(test)]\n#[path = \"claim_tests.rs\"]\nmod tests;\nmod claim;";
        let files = |file: &str| strip(text).test_files(Path::new(file));
        assert_eq!(files("src/plan/mod.rs"), ["src/plan/samples.rs", "src/plan/claim_tests.rs"].map(PathBuf::from));
        assert_eq!(files("src/plan/claim.rs")[0], Path::new("src/plan/claim/samples.rs"));
    }
}
