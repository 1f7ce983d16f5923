// The scene of tests/clients/scene.py for clients in JavaScript: what is asked, the tool, and the report.
const { NOTES, QUESTIONS } = JSON.parse(process.env.SCENE);

export const { BASE_URL, MODEL } = process.env;
export const [api, mode] = process.argv.slice(2);
export const streams = mode === "streamed";
export const name = "read_note";
export const description = "Reads a note.";
export const parameters = {
  type: "object",
  properties: { name: { type: "string" } },
  required: ["name"],
  additionalProperties: false,
};

export async function readNote({ name }) {
  return NOTES[name];
}

// Asks one question after the other; `ask` gives the text of the answer.
export async function play(ask) {
  const answers = [];
  for (const question of QUESTIONS) answers.push(await ask(question));
  console.log(JSON.stringify(answers));
}
