//! Finds in the output of a program the sentence that says why it failed.

/// Lines of a program's output that are looked at, from its end.
const LINES_MAX: usize = 4;

/// Length limit of one line.
const LINE_MAX_CHARS: usize = 300;

/// What `config.sh` and `run.sh` print whatever happens: banner, headings, successes, frames of a stack, and what `run.sh`
/// says when its listener has ended (actions/runner v2.336.0, `src/Misc/layoutroot/run.sh` and `run-helper.sh.template`).
fn is_noise(line: &str) -> bool {
    let starts = ["|", "---", "# ", "√", "at ", "Current runner version:", "Runner listener exit", "Restarting runner"];
    starts.iter().any(|start| line.starts_with(start))
        || ["Exiting...", "Exiting runner..."].contains(&line)
        || line.ends_with("Listening for Jobs")
}

/// The last lines that mean something, in one line: the cause is often in the one before the last.
pub fn why(output: &str) -> String {
    let lines = || output.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut telling: Vec<_> = lines().filter(|line| !is_noise(line)).collect();
    telling.dedup();
    if telling.is_empty() {
        telling.extend(lines().next_back());
    }
    let last = &telling[telling.len().saturating_sub(LINES_MAX)..];
    let cut = |line: &&str| line.chars().take(LINE_MAX_CHARS).collect::<String>();
    last.iter().map(cut).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_found_in_what_the_runners_programs_print() {
        let no_icu = "Libicu's dependencies is missing for Dotnet Core 6.0\nExecute sudo ./bin/installdependencies.sh to \
                      install any missing Dotnet Core 6.0 dependencies.\n";
        assert_eq!(why(no_icu), no_icu.trim().replace('\n', "; "));
        let refused = "|  / ___(_) |_  |\n-----------\n\n# Authentication\n\nHttp response code: NotFound from 'POST \
                       https://api.github.com/actions/runner-registration' (Request Id: 1:2)\nResponse status code does \
                       not indicate success: 404 (Not Found).\n";
        assert_eq!(
            why(refused),
            "Http response code: NotFound from 'POST https://api.github.com/actions/runner-registration' (Request Id: \
             1:2); Response status code does not indicate success: 404 (Not Found)."
        );
        let ended = "\n√ Connected to GitHub\n\nCurrent runner version: '2.330.0'\n2026-11-19 05:00:00Z: Listening for \
                     Jobs\nAn error occurred: Runner version v2.330.0 is deprecated and cannot receive messages.\nRunner \
                     listener exit with terminated error, stop the service, no retry needed.\nExiting runner...\n";
        assert_eq!(why(ended), "An error occurred: Runner version v2.330.0 is deprecated and cannot receive messages.");
        let crash = "Process terminated. Couldn't find a valid ICU package installed on the system.\n   at \
                     System.Environment.FailFast(System.String)\n   at Program.Main()\n";
        assert_eq!(why(crash), "Process terminated. Couldn't find a valid ICU package installed on the system.");
    }

    #[test]
    fn of_much_output_little_is_kept_and_of_none_nothing() {
        assert_eq!(why(""), "");
        assert_eq!(why("\nExiting runner...\n"), "Exiting runner...");
        assert_eq!(why("1\n2\n3\n3\n4\n5\n"), "2; 3; 4; 5");
        assert_eq!(why(&"ü".repeat(1000)).chars().count(), LINE_MAX_CHARS);
    }
}
