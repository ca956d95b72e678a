// How the search of the site orders its results. The numbers are Sphinx's.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  // An index entry is a name of another system. It leads to its page only if it
  // is the whole query: "precision" is not "precision_mode".
  score: ([, , , , score, , kind]) =>
    kind === "index" && score < 100 ? 0 : score,
};
